"""What an offer that grows has had so far is planned section by section."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.layout import Full
from kvd.plan import Planner, Section, SpanPair, route
from tests.plan.layout_cases import Case, cases
from tests.plan.layout_reference import contents
from tests.plan.test_oracle import thorough


def spans_of(case: Case, offered: list[int]) -> list[SpanPair]:
    """With so many of the offered blocks of each group."""
    return [
        SpanPair(
            source.first,
            np.array(source.ids[:count], dtype=np.uint32),
            wanted.first,
            np.array(wanted.ids, dtype=np.uint32),
        )
        for source, wanted, count in zip(case.offered, case.wanted, offered, strict=True)
    ]


def bytes_of(plan) -> dict[int, int]:
    """Where each byte goes, and where it comes from."""
    found: dict[int, int] = {}
    for src, dst, length in plan.copies:
        for byte in range(length):
            assert dst + byte not in found
            found[dst + byte] = src + byte
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("few", [0, 1 << 20], ids=["in arrays", "one by one"])
@thorough
@given(case=cases(), data=st.data())
def test_sections_move_together_what_the_whole_moves_each_byte_once_and_nothing_that_is_not_complete(few, case, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, case.tokens), max_size=4)))
    for share in route(case.sources, case.destination).shares:
        source = case.sources[share.source]
        planner = Planner(source, case.destination, share)
        whole = [len(each.ids) for each in case.offered]
        expected = bytes_of(planner.plan(spans_of(case, whole), case.tokens))
        moved: dict[int, int] = {}
        start = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvd.plan.planner.FEW", few)
            for stop in (*cuts, None):
                held = whole if stop is None else [named(case, number, stop) for number in range(len(whole))]
                part = bytes_of(planner.plan(spans_of(case, held), stop or case.tokens, Section(start, stop)))
                assert moved.keys().isdisjoint(part)
                moved |= part
                if stop is not None:
                    assert incomplete(case, share.source, stop).isdisjoint(part.values())
                    start = stop
        assert moved == expected


def named(case: Case, group: int, tokens: int) -> int:
    """How many blocks are known once `tokens` are complete."""
    spec = case.sources[0].groups[group]
    if not isinstance(spec.window, Full):
        return 0
    return max(0, -(-tokens // spec.block_tokens) - case.offered[group].first)


def incomplete(case: Case, rank: int, tokens: int) -> set[int]:
    """Addresses of a source that may still be written to when so many tokens are complete."""
    source = case.sources[rank]
    held = contents(source, case.offered, case.tokens)
    return {at for key, at in held.items() if not isinstance(source.groups[key[0]].window, Full) or key[5] >= tokens}
