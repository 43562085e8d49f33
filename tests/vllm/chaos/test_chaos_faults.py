"""What the chaos draws from a seed."""

import itertools

from tests.vllm.chaos.faults import KINDS, MOST, draw

VICTIMS = ("prefill daemon", "decode daemon", "prefill server", "decode server", "router")


def test_equal_seeds_draw_the_same_rounds_and_others_draw_others() -> None:
    first, again, other = (list(itertools.islice(draw(seed, VICTIMS), 20)) for seed in (7, 7, 8))
    assert first == again != other


def test_the_order_in_which_victims_are_named_does_not_matter() -> None:
    assert next(draw(7, VICTIMS)) == next(draw(7, VICTIMS[::-1]))


def test_a_round_has_one_fault_of_a_victim_and_in_time_everything_happens_to_everybody() -> None:
    rounds = list(itertools.islice(draw(7, VICTIMS), 200))
    for one in rounds:
        assert len({fault.victim for fault in one.faults}) == len(one.faults) <= MOST
    drawn = {(fault.victim, fault.kind) for one in rounds for fault in one.faults}
    assert drawn == set(itertools.product(VICTIMS, KINDS))
