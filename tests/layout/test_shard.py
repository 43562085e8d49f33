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


def test_every_rank_holds_the_only_head() -> None:
    assert [list(shard.heads(1)) for shard in ranks(4)] == [[0]] * 4


def test_one_shard_tells_where_all_ranks_of_its_engine_stand() -> None:
    shard = Shard(stages=((0, 3), (3, 5)), tp_size=2, tp_rank=1, pp_rank=1)
    engine = list(shard.every_rank())
    assert [member.rank for member in engine] == [0, 1, 2, 3]
    assert [list(member.layers) for member in engine] == [[0, 1, 2], [0, 1, 2], [3, 4], [3, 4]]
    assert engine[shard.rank] == shard
