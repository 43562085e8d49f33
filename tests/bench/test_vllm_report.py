from pathlib import Path

import pytest

from kvd.bench.vllm import Request, Side, Transfers, split_gaps
from kvd.bench.vllm_report import percentiles, plot, summary, table


def side(name: str, scale: float) -> Side:
    transfers = Transfers(1, 0.1 * scale, 0.2 * scale, 1000, 10)
    requests = [Request(1.0 * scale, 0.5, 0.5 * scale, transfers), Request(3.0 * scale, 0.5, 0.5 * scale, transfers)]
    gaps = [0.01 * scale, 0.02 * scale]
    return Side(name, requests, gaps, [2 * gap for gap in gaps], [0.02 * scale], [0.04 * scale], [100.0])


def test_a_gap_counts_as_busy_if_it_shares_any_moment_with_an_arrival() -> None:
    quiet, busy = split_gaps([0.0, 1.0, 2.0, 3.0, 4.0], [(1.5, 2.25)])
    assert len(quiet) == 2
    assert len(busy) == 2
    assert split_gaps([0.0, 1.0], [(1.0, 2.0)]) == ([1.0], [])


def test_the_summary_takes_medians_over_requests_and_percentiles_over_gaps() -> None:
    found = summary(side("kvd", 1.0))
    assert found.first_token == 2.0
    assert found.transfer == 0.1
    assert found.busy["max"] == 0.04
    assert percentiles([3.0, 1.0, 2.0]) == {"p50": 2.0, "p99": 3.0, "max": 3.0}


def test_a_side_without_a_round_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match="raise --seconds"):
        summary(Side("kvd"))


def test_the_table_sets_kvd_against_the_best_of_the_others() -> None:
    result = table(*(summary(side(name, scale)) for name, scale in (("kvd", 1.0), ("four", 5.0), ("none", 2.0))))
    assert [column.header for column in result.columns] == ["", "kvd", "four", "none", "kvd / best"]
    assert list(result.columns[4].cells)[:2] == ["0.50", "0.50"]


def test_the_picture_is_written(tmp_path: Path) -> None:
    plot([side("kvd", 1.0), side("nixl", 2.0)], tmp_path / "figures.png")
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")
