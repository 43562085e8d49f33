"""`python -m benchmarks.threads`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real


def test_each_process_of_a_pull_has_its_share(tmp_path: Path) -> None:
    """In a process of its own: NIXL, which it reads by as well, sets variables of the environment."""
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.threads", "--pulls", "100", "--json", str(file)]
    assert "64 x 256 KiB" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    producers_work = 0.0
    for size in json.loads(file.read_text())["sizes"]:
        work = {(each["process"], each["threads"]): each["work"] for each in size["taken"]}
        assert min(work["engine", "main"], work["consumer's daemon", "main"]) > 0
        producers_work += work["producer's daemon", "main"]  # pulls go on while its daemon gets no processor
        copied = size["blocks"] * size["block_bytes"]
        assert sum(work.values()) > copied / 1e5  # no machine copies 100 GB/s by one thread
        assert size["kvd"] > 0
        assert size["nixl"] > 0
    assert producers_work > 0
