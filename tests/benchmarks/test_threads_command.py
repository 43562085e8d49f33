"""`python -m benchmarks.threads`."""

import json
from pathlib import Path

import pytest

from benchmarks import threads

pytestmark = pytest.mark.real


def test_each_process_of_a_pull_has_its_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert threads.main(["--pulls", "100", "--json", str(file)]) == 0
    assert "64 x 256 KiB" in capsys.readouterr().out
    for size in json.loads(file.read_text())["sizes"]:
        work = {(each["process"], each["threads"]): each["work"] for each in size["taken"]}
        assert min(work["engine", "main"], work["consumer's daemon", "main"], work["producer's daemon", "main"]) > 0
        copied = size["blocks"] * size["block_bytes"]
        assert sum(work.values()) > copied / 1e5  # no machine copies 100 GB/s by one thread
        assert size["kvd"] > 0
        assert size["nixl"] > 0
