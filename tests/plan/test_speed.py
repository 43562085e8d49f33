"""The figures that planning is held to; `kvd bench --plan` prints them."""

import pytest

from kvd.cli.bench_plan import PlanTiming, bench_plan, print_timings


@pytest.fixture(scope="module")
def timings() -> list[PlanTiming]:
    return bench_plan(lambda descriptors, pool_bytes: None)


def test_a_million_descriptors_are_planned_in_50_ms(timings: list[PlanTiming]) -> None:
    (million,) = [timing for timing in timings if 990_000 < timing.descriptors <= 1_000_000]
    assert million.plan <= 0.050


def test_a_100_000_token_cross_layer_plan_of_80_layers_takes_5_ms(timings: list[PlanTiming]) -> None:
    (cross_layer,) = [timing for timing in timings if "cross-layer" in timing.case and timing.descriptors > 1]
    assert 6200 < cross_layer.descriptors <= 6250
    assert cross_layer.plan <= 0.005


def test_one_block_is_planned_in_50_us(timings: list[PlanTiming]) -> None:
    assert timings[0].descriptors == 1
    assert timings[0].plan <= 50e-6


def test_the_cost_of_a_descriptor_does_not_grow_with_their_number(timings: list[PlanTiming]) -> None:
    largest = timings[-1]
    assert largest.descriptors > 1_990_000
    assert largest.nanoseconds_each <= 50


def test_planning_is_far_quicker_than_a_loop_over_layers_and_blocks(timings: list[PlanTiming]) -> None:
    assert all(timing.plan * 5 < timing.plain for timing in timings)


def test_the_timings_are_printed_as_a_table(timings: list[PlanTiming], capsys) -> None:
    print_timings(timings)
    assert "100,000 tokens, cross-layer" in capsys.readouterr().out
