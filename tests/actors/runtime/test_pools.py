import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd import limits
from kvd.actors.runtime.pools import BlocksInUse
from kvd.bench.spec import flat_spec
from kvd.errors import BadRequest, ErrorCode, Unavailable
from kvd.layout import CacheSpec, Full, Group, Shard
from kvd.layout.presets import FLASH_HND, Attention, Placement
from kvd.protocol.types import Span
from tests.actors.stage import ids
from tests.simulator.virtual.cache import make_cache
from tests.support.blocks import offered

SEPARATE = make_cache("flash-hnd", 0, 1, num_blocks=8, block_tokens=2, groups=2).spec


def shared_spec():
    shard = Shard(stages=((0, 2),))
    groups = []
    for layer in (0, 1):
        place = Placement(order=FLASH_HND, shard=shard, layers=[layer], num_blocks=8, block_tokens=2)
        views = Attention(2, 2).views(place)
        groups.append(Group(window=Full(), block_tokens=2, num_blocks=8, views=views, arena=0))
    size = max(view.end for group in groups for view in group.views)
    return CacheSpec(dtype="fp8", pool_bytes=size, groups=tuple(groups), shard=shard)


def test_a_block_belongs_to_one_pull_at_a_time():
    use = BlocksInUse(SEPARATE)
    use.take((Span(0, 0, ids(1, 2)),))
    with pytest.raises(Unavailable, match="block 2 of group 0") as caught:
        use.take((Span(0, 0, ids(2, 3)),))
    assert caught.value.code == ErrorCode.BLOCKS_BUSY
    use.give_back((Span(0, 0, ids(1, 2)),))
    use.take((Span(0, 0, ids(2, 3)),))
    assert use.busy == 2


def test_a_refusal_takes_nothing():
    use = BlocksInUse(SEPARATE)
    use.take((Span(1, 0, ids(5)),))
    with pytest.raises(Unavailable):
        use.take((Span(0, 0, ids(1, 2)), Span(1, 0, ids(4, 5))))
    assert use.busy == 1


def test_a_block_may_not_be_named_twice():
    use = BlocksInUse(SEPARATE)
    with pytest.raises(BadRequest, match="block 3 is named twice, the second time by group 0"):
        use.take((Span(0, 0, ids(1, 3, 3)),))
    assert use.busy == 0


def test_groups_with_memory_of_their_own_do_not_meet():
    use = BlocksInUse(SEPARATE)
    use.take((Span(0, 0, ids(1)), Span(1, 0, ids(1))))
    assert use.busy == 2


def test_groups_that_share_memory_share_blocks():
    use = BlocksInUse(shared_spec())
    with pytest.raises(BadRequest, match="block 1 is named twice, the second time by group 1"):
        use.take((Span(0, 0, ids(1)), Span(1, 0, ids(1))))
    assert use.busy == 0
    use.take((Span(0, 0, ids(1)),))
    with pytest.raises(Unavailable):
        use.take((Span(1, 0, ids(1)),))


def test_a_block_that_is_offered_is_not_written_to_until_the_last_offer_of_it_has_ended():
    use = BlocksInUse(SEPARATE)
    for blocks in ((1, 2), (2, 3), (2,)):
        use.offer((Span(0, 0, ids(*blocks)),))
    assert offered(use) == 3
    for ended, left in (((2, 3), (1, 2)), ((1, 2), (2,)), ((2,), ())):
        with pytest.raises(Unavailable, match="block 2 of group 0 stands in an offer") as caught:
            use.take((Span(1, 0, ids(2)), Span(0, 0, ids(0, 2))))
        assert caught.value.code == ErrorCode.BLOCKS_BUSY
        assert use.busy == 0
        use.release((Span(0, 0, ids(*ended)),))
        assert offered(use) == len(left)
    use.take((Span(0, 0, ids(1, 2, 3)),))


def test_a_block_that_a_pull_writes_to_is_not_offered_until_the_pull_has_ended():
    use = BlocksInUse(shared_spec())
    use.take((Span(0, 0, ids(1)),))
    with pytest.raises(Unavailable, match="block 1 of group 1 belongs to a pull") as caught:
        use.offer((Span(0, 0, ids(2)), Span(1, 0, ids(1))))
    assert caught.value.code == ErrorCode.BLOCKS_BUSY
    assert offered(use) == 0
    use.give_back((Span(0, 0, ids(1)),))
    use.offer((Span(0, 0, ids(2)), Span(1, 0, ids(1))))
    assert offered(use) == 2


@given(st.lists(st.lists(st.integers(0, 7), max_size=6), max_size=6))
def test_what_is_offered_is_what_stands_in_an_offer(offers):
    """In whatever order they end, and however often they name a block."""
    use, standing = BlocksInUse(SEPARATE), []
    for blocks in offers:
        use.offer((Span(0, 0, ids(*blocks)),))
        standing.append(blocks)
    while standing:
        assert offered(use) == len({block for blocks in standing for block in blocks})
        use.release((Span(0, 0, ids(*standing.pop(len(standing) // 2))),))
    assert offered(use) == 0
    use.take((Span(0, 0, ids(*range(8))),))


def test_too_many_block_ids_in_offers_are_refused(monkeypatch):
    monkeypatch.setattr(limits, "MAX_OFFERED_BLOCKS", 3)
    use = BlocksInUse(SEPARATE)
    use.offer((Span(0, 0, ids(1, 2)),))
    with pytest.raises(Unavailable, match="with this offer 4 block ids") as caught:
        use.offer((Span(0, 0, ids(1, 2)),))
    assert caught.value.code == ErrorCode.OVERLOADED
    use.release((Span(0, 0, ids(1, 2)),))
    use.offer((Span(0, 0, ids(1, 2, 3)),))


def test_a_pool_of_which_many_blocks_stood_in_two_offers_is_as_quick_afterwards_as_before():
    many = 1 << 18
    spec = flat_spec(many, 16)
    used, fresh = BlocksInUse(spec), BlocksInUse(spec)
    everything = (Span(0, 0, ids(*range(many))),)
    for _ in range(2):
        used.offer(everything)
    for _ in range(2):
        used.release(everything)
    assert _offered_and_released(used) < 10 * _offered_and_released(fresh)


def _offered_and_released(use):
    """The least seconds of this thread's processor, of many times: whatever else runs only makes it longer."""
    taken = []
    for block in range(500):
        begun = time.thread_time()
        use.offer((Span(0, 0, ids(block)),))
        use.release((Span(0, 0, ids(block)),))
        taken.append(time.thread_time() - begun)
    return min(taken)
