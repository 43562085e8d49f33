"""How much is logged."""

import logging

from kvd.cli.router import FewLines
from kvd.router import limits


def lines(filtered: FewLines, number: int, place: int) -> list[str]:
    """Logs `number` lines from a line of code of this number; those that were let through."""
    records = [logging.LogRecord("kvd", logging.WARNING, "x.py", place, "no %d", (one,), None) for one in range(number)]
    return [record.getMessage() for record in records if filtered.filter(record)]


def test_one_place_logs_few_lines_a_minute_and_says_how_many_it_left_out(monkeypatch) -> None:
    now = 1000.0
    monkeypatch.setattr("kvd.cli.router.time.monotonic", lambda: now)
    filtered = FewLines()
    assert len(lines(filtered, 1000, place=1)) == limits.LINES
    now += 59
    assert lines(filtered, 1, place=1) == []
    assert lines(filtered, 1, place=2) == ["no 0"]
    now += 1
    left_out = 1001 - limits.LINES
    assert lines(filtered, 2, place=1) == [f"no 0 ({left_out} more were not logged)", "no 1"]
