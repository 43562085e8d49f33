"""Planning must not loop over blocks, and must meet figures (`python -m benchmarks.plan` prints them)."""

import pytest

from benchmarks.plan import PlanTiming, bench_plan, print_timings, scattered_request
from kvd.layout.presets import LAYOUTS
from tests.support.steps import steps

BLOCKS = 6250


@pytest.fixture(scope="module")
def timings() -> list[PlanTiming]:
    return bench_plan(lambda descriptors, pool_bytes: None)


@pytest.mark.parametrize("layout", ["cross-layer-hnd", "flash-hnd", "flashinfer-nhd"])
def test_a_plan_takes_far_fewer_steps_than_it_moves_blocks(layout: str) -> None:
    _, planner, span = scattered_request(LAYOUTS[layout], BLOCKS)
    assert planner.plan([span]).count > 0.9 * BLOCKS
    assert steps(lambda: planner.plan([span])) < BLOCKS / 5


def test_one_block_takes_no_more_steps_than_thousands() -> None:
    _, planner, span = scattered_request(LAYOUTS["cross-layer-hnd"], 1)
    assert steps(lambda: planner.plan([span])) < BLOCKS / 5


@pytest.mark.alone
def test_a_million_descriptors_are_planned_in_50_ms(timings: list[PlanTiming]) -> None:
    (million,) = [timing for timing in timings if 990_000 < timing.descriptors <= 1_000_000]
    assert million.plan <= 0.050


@pytest.mark.alone
def test_a_100_000_token_cross_layer_plan_of_80_layers_takes_5_ms(timings: list[PlanTiming]) -> None:
    (cross_layer,) = [timing for timing in timings if "cross-layer" in timing.case and timing.descriptors > 1]
    assert 6200 < cross_layer.descriptors <= 6250
    assert cross_layer.plan <= 0.005


@pytest.mark.alone
def test_the_cost_of_a_descriptor_does_not_grow_with_their_number(timings: list[PlanTiming]) -> None:
    largest = timings[-1]
    assert largest.descriptors > 1_990_000
    assert largest.nanoseconds_each <= 50


@pytest.mark.alone
def test_planning_many_blocks_is_far_quicker_than_a_loop_over_layers_and_blocks(timings: list[PlanTiming]) -> None:
    one, *many = timings
    assert one.descriptors == 1
    assert all(timing.plan * 5 < timing.plain for timing in many)


def test_the_timings_are_printed_as_a_table(capsys) -> None:
    print_timings([PlanTiming("100,000 tokens, cross-layer", 6250, 0.001, 0.5, None)])
    assert "100,000 tokens, cross-layer" in capsys.readouterr().out
