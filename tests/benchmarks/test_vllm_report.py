from pathlib import Path

import pytest

from benchmarks.estimate import estimate
from benchmarks.vllm.report import FIGURES, plot, tables
from benchmarks.vllm.run import Side, split_gaps


def side(name: str, placement: str, scale: float, rounds: int = 9) -> Side:
    figures = {figure.name: scale for figure in FIGURES} | {"tokens_a_second_6": 100 / scale}
    return Side(
        name, placement, [{key: value * (1 + 0.01 * n) for key, value in figures.items()} for n in range(rounds)]
    )


def sides() -> list[Side]:
    names = (("kvd", 1.0), ("four", 5.0), ("none", 2.0))
    return [side(name, placement, scale) for placement in ("pinned", "unpinned") for name, scale in names]


def test_a_gap_counts_as_busy_if_it_shares_any_moment_with_an_arrival() -> None:
    quiet, busy = split_gaps([0.0, 1.0, 2.0, 3.0, 4.0], [(1.5, 2.25)])
    assert len(quiet) == 2
    assert len(busy) == 2
    assert split_gaps([0.0, 1.0], [(1.0, 2.0)]) == ([1.0], [])


def test_a_median_comes_with_the_interval_in_which_it_lies_when_rounds_are_drawn_again() -> None:
    found = estimate([1.0, 2.0, 3.0, 4.0, 100.0])
    assert found.value == 3.0
    assert 1.0 <= found.low < 3.0 < found.high <= 100.0
    same = estimate([7.0] * 8)
    assert (same.low, same.value, same.high) == (7.0, 7.0, 7.0)


def test_a_ratio_draws_the_same_rounds_for_both_sides() -> None:
    moments = [1.0, 5.0, 2.0, 9.0, 3.0]  # what the machine did in each round met both
    found = estimate([2 * moment for moment in moments], moments)
    assert (found.low, found.value, found.high) == (2.0, 2.0, 2.0)
    assert estimate([1.0, 1.0, 50.0], [2.0, 2.0]).value == 0.5


def test_the_tables_set_kvd_against_the_best_of_the_others_in_each_placement() -> None:
    pinned, unpinned = tables(sides())
    assert "unpinned" in str(unpinned.title)
    assert [column.header for column in pinned.columns] == ["", "kvd", "four", "none", "kvd / best"]
    rows = {str(name): cell for name, cell in zip(pinned.columns[0].cells, pinned.columns[4].cells, strict=True)}
    assert str(rows["one pull, with claim and fence"]).startswith("0.50")
    assert str(rows["tokens a second, 6 at once"]).startswith("2.00")


def test_over_a_rival_that_has_nothing_of_a_kind_there_is_no_ratio() -> None:
    rival = side("four", "pinned", 2.0)
    for found in rival.rounds:
        found["daemons_processor"] = 0.0
    (table,) = tables([side("kvd", "pinned", 1.0), rival])
    rows = {str(name): cell for name, cell in zip(table.columns[0].cells, table.columns[3].cells, strict=True)}
    assert rows["processor time of both daemons while one arrives"] == "-"
    assert str(rows["one pull, with claim and fence"]).startswith("0.50")


def test_beside_the_median_of_the_worst_stands_the_worst_of_all_rounds() -> None:
    (table,) = tables([side("kvd", "pinned", 0.1), side("four", "pinned", 0.2)])
    rows = {str(name): cell for name, cell in zip(table.columns[0].cells, table.columns[1].cells, strict=True)}
    assert str(rows["killed under load: to the first token that the next daemon pulled"]).endswith(", most 108")


def test_kvd_in_other_groups_has_a_column_and_is_no_rival_of_kvd() -> None:
    (table,) = tables([side("kvd", "pinned", 1.0), side("kvd, cgroup", "pinned", 0.5), side("four", "pinned", 2.0)])
    assert [column.header for column in table.columns] == ["", "kvd", "kvd, cgroup", "four", "kvd / best"]
    rows = {str(name): cell for name, cell in zip(table.columns[0].cells, table.columns[4].cells, strict=True)}
    assert str(rows["one pull, with claim and fence"]).startswith("0.50")


def test_a_run_that_was_cut_short_is_told_as_far_as_it_came() -> None:
    short = sides()
    for later in short[2:]:
        later.rounds.clear()
    (pinned,) = tables(short)
    assert [column.header for column in pinned.columns] == ["", "kvd", "four", "kvd / best"]


def test_a_run_without_a_round_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match="raise --seconds"):
        tables([Side("kvd", "pinned")])


def test_the_picture_is_written(tmp_path: Path) -> None:
    plot(sides(), tmp_path / "figures.png")
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")
