import pytest

from kvd.actors.runtime.blocks import BusyBlocks
from kvd.errors import BadRequest, ErrorCode, Unavailable
from kvd.layout import CacheSpec, Full, Group, Shard
from kvd.layout.presets import FLASH_HND, Attention, Placement
from kvd.protocol.types import Span
from tests.actors.stage import ids
from tests.simulator.virtual.cache import make_cache

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
    busy = BusyBlocks(SEPARATE)
    busy.take((Span(0, 0, ids(1, 2)),))
    with pytest.raises(Unavailable, match="block 2 of group 0") as caught:
        busy.take((Span(0, 0, ids(2, 3)),))
    assert caught.value.code == ErrorCode.BLOCKS_BUSY
    busy.give_back((Span(0, 0, ids(1, 2)),))
    busy.take((Span(0, 0, ids(2, 3)),))
    assert busy.count == 2


def test_a_refusal_takes_nothing():
    busy = BusyBlocks(SEPARATE)
    busy.take((Span(1, 0, ids(5)),))
    with pytest.raises(Unavailable):
        busy.take((Span(0, 0, ids(1, 2)), Span(1, 0, ids(4, 5))))
    assert busy.count == 1


def test_a_block_may_not_be_named_twice():
    busy = BusyBlocks(SEPARATE)
    with pytest.raises(BadRequest, match="block 3 is named twice, the second time by group 0"):
        busy.take((Span(0, 0, ids(1, 3, 3)),))
    assert busy.count == 0


def test_groups_with_memory_of_their_own_do_not_meet():
    busy = BusyBlocks(SEPARATE)
    busy.take((Span(0, 0, ids(1)), Span(1, 0, ids(1))))
    assert busy.count == 2


def test_groups_that_share_memory_share_blocks():
    busy = BusyBlocks(shared_spec())
    with pytest.raises(BadRequest, match="block 1 is named twice, the second time by group 1"):
        busy.take((Span(0, 0, ids(1)), Span(1, 0, ids(1))))
    assert busy.count == 0
    busy.take((Span(0, 0, ids(1)),))
    with pytest.raises(Unavailable):
        busy.take((Span(1, 0, ids(1)),))
