"""Who reads from whom is worked out for engines of many ranks without keeping the event loop for long."""

import pytest

from kvd.errors import BadRequest, ErrorCode
from kvd.layout import CacheSpec, Full, Group, Shard, View, strided
from kvd.plan import route
from kvd.plan.route import heads_read


def rank_of(rank: int, tp_size: int, heads: int = 1, stages: tuple[tuple[int, int], ...] = ((0, 2),)) -> CacheSpec:
    shard = Shard(stages=stages, tp_rank=rank % tp_size, tp_size=tp_size, pp_rank=rank // tp_size)
    layers = tuple(shard.layers)
    sizes = {"layer": len(layers), "block": 2, "head": len(shard.heads(heads)), "token": 2, "byte": 2}
    axes = strided("layer block head token byte", sizes)
    view = View(component="kv", offset=0, heads=heads, axes=axes, layers=layers)
    group = Group(window=Full(), block_tokens=2, num_blocks=2, views=(view,))
    return CacheSpec(dtype="bfloat16", pool_bytes=view.end, groups=(group,), shard=shard)


def test_engines_of_so_many_ranks_that_it_would_take_long_are_refused() -> None:
    sources = [rank_of(rank, 256) for rank in range(256)]
    with pytest.raises(BadRequest, match="256 ranks of the source, 256 of the destination, 1 different") as caught:
        route(sources, rank_of(0, 256))
    assert caught.value.code is ErrorCode.INCOMPATIBLE


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize(("theirs", "ours"), [(1, 4), (4, 1), (2, 8), (8, 2), (4, 4)])
@pytest.mark.parametrize("stages", [((0, 4),), ((0, 1), (1, 4)), ((0, 2), (2, 3), (3, 4))])
def test_readers_are_counted_as_if_each_rank_was_asked(
    heads: int, theirs: int, ours: int, stages: tuple[tuple[int, int], ...]
) -> None:
    halves = ((0, 2), (2, 4))
    sources = [rank_of(rank, theirs, heads, halves) for rank in range(2 * theirs)]
    engine = rank_of(0, ours, heads, stages).shard
    expected = [
        sum(
            bool(heads_read(heads, source.shard, reader)) and bool(set(source.shard.layers) & set(reader.layers))
            for reader in engine.every_rank()
        )
        for source in sources
    ]
    assert list(route(sources, rank_of(0, ours, heads, stages)).readers) == expected
