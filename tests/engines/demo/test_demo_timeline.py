"""The demo's timeline: bars whose heights are what is complete and what is read, and a picture."""

from pathlib import Path

from rich.console import Console

from kvd.engines.demo.timeline import AT_ONCE, IN_TURN, WIDTH, Timeline, as_table, plot

LINES = [
    Timeline(IN_TURN, [(0, 0), (0.8, 100)], [(0, 0), (0.9, 100)], prefilled=0.8, first_token=1.0),
    Timeline(AT_ONCE, [(0, 0), (0.4, 50), (0.8, 100)], [(0, 0), (0.5, 50), (0.81, 100)], 0.8, 0.82),
]


def test_a_bar_is_as_high_as_what_has_moved_and_ends_with_the_first_token() -> None:
    console = Console(width=WIDTH, record=True)
    console.print(as_table(LINES))
    in_turn, read, at_once, early = [line for line in console.export_text().splitlines() if line.startswith("│")]
    assert "800 ms" in in_turn
    assert "200 ms later" in in_turn
    assert "20 ms later" in at_once
    assert (in_turn.count("█"), read.count("█")) == (13, 7)
    assert (at_once.count("▄"), at_once.count("█")) == (24, 3)
    assert (early.count("▄"), early.count("█")) == (19, 2)


def test_the_picture_is_written_where_it_is_wanted(tmp_path: Path) -> None:
    plot(LINES, tmp_path / "new" / "timeline.png")
    assert (tmp_path / "new" / "timeline.png").stat().st_size > 10_000
