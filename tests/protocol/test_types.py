import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import BadRequest, ErrorCode
from kvd.protocol.types import Span, joined


def span(group, first, *blocks):
    return Span(group, first, b"".join(block.to_bytes(4, "little") for block in blocks))


def test_blocks_that_continue_each_other_become_one_span_a_group():
    parts = [(span(1, 3, 7), span(0, 0, 1, 2)), (span(0, 2, 9),), (span(2, 5), span(1, 4, 8))]
    assert joined(parts) == (span(1, 3, 7, 8), span(0, 0, 1, 2, 9), span(2, 5))


@pytest.mark.parametrize("first", [0, 1, 3])
def test_blocks_that_go_back_or_leave_a_gap_are_refused_with_both_positions(first):
    with pytest.raises(BadRequest, match=f"group 4 are named from position {first} on; those before end at 2") as error:
        joined([(span(4, 0, 1, 2),), (span(4, first, 3),)])
    assert error.value.code is ErrorCode.BAD_BLOCKS


@st.composite
def growth(draw):
    """Parts of an offer, and where a reader asks for more."""
    stops = {}
    parts = []
    for _ in range(draw(st.integers(0, 5))):
        part = []
        for group in draw(st.permutations(range(3)))[: draw(st.integers(0, 3))]:
            first = stops.setdefault(group, draw(st.integers(0, 3)))
            blocks = draw(st.lists(st.integers(0, 99), max_size=3))
            part.append(span(group, first, *blocks))
            stops[group] += len(blocks)
        parts.append(tuple(part))
    return parts, sorted(draw(st.sets(st.integers(0, len(parts)))))


@given(growth())
def test_whoever_is_told_in_several_goes_has_the_same_list_in_the_end(grown):
    parts, asks = grown
    told, seen = (), 0
    for now in (*asks, len(parts)):
        told, seen = joined([told, joined(parts[seen:now])]), now
    assert told == joined(parts)
