"""How much is logged, and how."""

import logging

from kvd.cli.router import FewLines, OneLine
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


def test_what_a_server_says_is_one_line_and_a_traceback_keeps_its_own() -> None:
    try:
        raise ValueError("why")  # noqa: TRY301
    except ValueError as error:
        found = (type(error), error, error.__traceback__)
    record = logging.LogRecord("kvd", logging.WARNING, "x.py", 1, "status 500: %s", ("a\nINFO b\x1b[2J",), found)
    first, *others = OneLine("%(levelname)s %(message)s").format(record).splitlines()
    assert first == "WARNING status 500: a?INFO b?[2J"
    assert others[-1] == "ValueError: why"
