"""Planning does not loop over blocks, layers or descriptors; what it takes in time is printed by `kvd bench --plan`."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvd.cli.bench_plan import bench_plan, print_timings, scattered_request
from kvd.layout.presets import LAYOUTS

BLOCKS = 6250


def steps(call: Callable[[], object]) -> int:
    """How many lines of Python run and functions are called, C's included: the same on any machine, however busy."""
    counted = 0

    def count(*_: Any) -> Any:
        nonlocal counted
        counted += 1
        return count

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(count)
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return counted


@pytest.mark.parametrize("layout", ["cross-layer-hnd", "flash-hnd", "flashinfer-nhd"])
def test_a_plan_takes_far_fewer_steps_than_it_moves_blocks(layout: str) -> None:
    _, planner, span = scattered_request(LAYOUTS[layout], BLOCKS)
    assert planner.plan([span]).count > 0.9 * BLOCKS
    assert steps(lambda: planner.plan([span])) < BLOCKS / 5


def test_one_block_takes_no_more_steps_than_thousands() -> None:
    _, planner, span = scattered_request(LAYOUTS["cross-layer-hnd"], 1)
    assert steps(lambda: planner.plan([span])) < BLOCKS / 5


def test_the_timings_are_of_the_plans_that_figures_are_promised_for(capsys) -> None:
    timings = bench_plan(lambda descriptors, pool_bytes: None)
    one, cross_layer, *per_layer = timings
    assert one.descriptors == 1
    assert 6200 < cross_layer.descriptors <= 6250
    assert [round(timing.descriptors, -4) for timing in per_layer] == [120_000, 250_000, 500_000, 1_000_000, 2_000_000]
    print_timings(timings)
    assert "100,000 tokens, cross-layer" in capsys.readouterr().out
