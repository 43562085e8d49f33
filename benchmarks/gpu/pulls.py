"""How fast pulls between two daemons on one GPU are: `kvd bench --device cuda:0`."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def speeds(*, quick: bool) -> dict[str, Any]:
    """Pulls in blocks of each size beside one copy of all; every byte is compared, those outside, too."""
    with tempfile.TemporaryDirectory(prefix="kvd-gpu-") as folder:
        file = Path(folder, "bench.json")
        command = [sys.executable, "-m", "kvd.cli.main", "bench", "--device", "cuda:0", "--json", str(file)]
        command += ["--quick"] if quick else []
        ran = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - ours
        if ran.returncode:
            raise AssertionError(f"status {ran.returncode}: {ran.stderr[-1200:]}")
        answers: dict[str, Any] = json.loads(file.read_text())["gpu"]
        return answers
