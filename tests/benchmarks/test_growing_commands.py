"""The measurement of reads that somebody waits for, with real daemons on a small load."""

from pathlib import Path

import pytest

from benchmarks import growing


@pytest.mark.real
def test_waits_are_measured_with_both_rules(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small = ["--streams", "3", "--chunks", "2", "--chunk-mib", "1", "--period-ms", "5", "--rounds", "2"]
    assert growing.main([*small, "--json", str(tmp_path / "waits.json")]) == 0
    said = capsys.readouterr().out
    assert "waited-for: close to done, median" in said
    assert "plainly-fair: close to done, median" in said
    assert "of 6" in said
    assert "waited-for" in (tmp_path / "waits.json").read_text()
