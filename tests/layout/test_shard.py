import itertools
from itertools import chain

import pytest

from kvd.layout import Shard


def ranks(tp_size: int) -> list[Shard]:
    return list(Shard(stages=((0, 1),), tp_size=tp_size).every_rank())


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_ranks_share_heads_out_evenly(tp_size: int) -> None:
    held = [shard.heads(8) for shard in ranks(tp_size)]
    assert list(chain.from_iterable(held)) == list(range(8))


def test_neighbouring_ranks_replicate_a_head_when_ranks_outnumber_heads() -> None:
    assert [list(shard.heads(2)) for shard in ranks(8)] == [[0]] * 4 + [[1]] * 4
    assert [shard.replica(2) for shard in ranks(8)] == [(0, 4), (1, 4), (2, 4), (3, 4)] * 2


def test_neighbouring_ranks_that_hold_the_same_heads_deal_tokens_out_and_are_replicas_beyond_that() -> None:
    dealt = list(Shard(stages=((0, 1),), tp_size=8, cp_size=2).every_rank())
    assert [shard.cp_rank for shard in dealt] == [0, 1] * 4
    assert [shard.replica(1) for shard in dealt] == [(0, 4), (0, 4), (1, 4), (1, 4), (2, 4), (2, 4), (3, 4), (3, 4)]
    assert [shard.replica(2) for shard in dealt] == [(0, 2), (0, 2), (1, 2), (1, 2)] * 2


def test_runs_of_tokens_meet_if_one_position_is_in_both() -> None:
    for ours, theirs in itertools.product((1, 2, 3, 4, 6), repeat=2):
        positions = range(ours * theirs)
        for one, other in itertools.product(range(ours), range(theirs)):
            shards = [
                Shard(stages=((0, 1),), tp_size=size, tp_rank=rank, cp_size=size)
                for size, rank in ((ours, one), (theirs, other))
            ]
            meet = any(position % ours == one and position % theirs == other for position in positions)
            assert shards[0].shares_tokens(shards[1]) is meet


def test_every_rank_holds_the_only_head() -> None:
    assert [list(shard.heads(1)) for shard in ranks(4)] == [[0]] * 4


def test_one_shard_tells_where_all_ranks_of_its_engine_stand() -> None:
    shard = Shard(stages=((0, 3), (3, 5)), tp_size=2, tp_rank=1, pp_rank=1)
    engine = list(shard.every_rank())
    assert [member.rank for member in engine] == [0, 1, 2, 3]
    assert [list(member.layers) for member in engine] == [[0, 1, 2], [0, 1, 2], [3, 4], [3, 4]]
    assert engine[shard.rank] == shard
