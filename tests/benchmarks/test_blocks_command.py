"""`python -m benchmarks.blocks`."""

import json
from pathlib import Path

import pytest

from benchmarks.blocks import __main__ as bench_blocks

pytestmark = pytest.mark.real


def test_both_daemons_are_watched_beside_nothing_and_beside_pulls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    assert bench_blocks.main(["--blocks", "3000", "--rounds", "2", "--json", str(file)]) == 0
    assert "one pull of 3,000 blocks takes" in capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert [each["daemon"] for each in figures["waited"]] == ["producer", "consumer"] * 2
    assert all(each["worst"] >= each["p50"] > 0 for each in figures["waited"])
    assert len(figures["pulls"]) == 2
    assert all(taken > 0 for taken in figures["loop"].values())
