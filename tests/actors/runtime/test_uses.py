"""What blocks are used for, however many one request names."""

from array import array
from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.actors.runtime import pools as module
from kvd.actors.runtime.pools import BlocksInUse, Uses
from kvd.bench.spec import flat_spec
from kvd.protocol.types import Span
from tests.actors.stage import ids
from tests.support.blocks import offered
from tests.support.steps import steps

BLOCKS = 8
MANY = 520_000

requests = st.tuples(st.sampled_from(("write", "free", "offer", "release")), st.lists(st.integers(0, BLOCKS - 1)))


@pytest.mark.parametrize("few", [0, module._FEW], ids=["as arrays", "one by one"])
def test_a_block_is_written_to_or_stands_in_offers_or_is_free(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FEW", few)
    monkeypatch.setattr(module, "_MANY", 3)
    given(st.lists(requests))(follow)()


def follow(done: list[tuple[str, list[int]]]) -> None:
    """Does what is asked for beside a plain model, and compares."""
    uses, written, offers = Uses(BLOCKS), [], []
    for what, blocks in done:
        used, offered = set(chain(*written)), Counter(chain(*offers))
        if what == "write":
            refused = uses.write(ids(*blocks))
            may = len(set(blocks)) == len(blocks) and not (used | offered.keys()) & set(blocks)
            assert (refused is None) == may
            assert may or refused in blocks
            written += [blocks] * may
        elif what == "free" and written:
            uses.free(ids(*written.pop()))
        elif what == "release" and offers:
            uses.offer(ids(*offers.pop()), -1)
        elif what == "offer":
            assert uses.first_written(ids(*blocks)) == next((block for block in blocks if block in used), None)
            if not used & set(blocks):
                uses.offer(ids(*blocks), +1)
                offers.append(blocks)
        used, offered = set(chain(*written)), Counter(chain(*offers))
        for block in range(BLOCKS):
            assert uses.is_offered(block) == (block in offered)
            assert uses.is_free(block) == (block not in used | offered.keys())


def test_half_a_million_blocks_are_marked_without_a_look_at_each() -> None:
    use = BlocksInUse(flat_spec(2 * MANY, 64))
    even, odd = (array("I", range(first, 2 * MANY, 2)).tobytes() for first in (0, 1))
    pulled, named = (Span(0, 0, even),), (Span(0, 0, odd),)

    def use_all() -> None:
        use.take(pulled)
        use.offer(named)
        use.release(named)
        use.give_back(pulled)

    assert steps(use_all) < MANY / 20
    assert use.busy == offered(use) == 0
