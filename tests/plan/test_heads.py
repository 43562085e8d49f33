"""Layers of one component with different numbers of heads, as a drafter's beside the model's."""

import numpy as np
import pytest

from kvd.layout import Axis, CacheSpec, Full, Group, Shard, View
from kvd.plan import Planner, SpanPair, check_compatible, route

TOTALS = (4, 2)
"""Heads of layer 0 and of layer 1, over all ranks."""

BLOCKS, TOKENS, HEAD = 5, 2, 8


def rank(number: int, size: int) -> CacheSpec:
    shard = Shard(stages=((0, len(TOTALS)),), tp_rank=number, tp_size=size)
    views, offset = [], 0
    for layer, total in enumerate(TOTALS):
        heads = len(shard.heads(total))
        page = heads * TOKENS * HEAD
        axes = Axis("block", BLOCKS, page), Axis("head", heads, TOKENS * HEAD), Axis("token", TOKENS, HEAD)
        axes = *axes, Axis("byte", HEAD, 1)
        views.append(View(component="kv", offset=offset, axes=axes, layers=(layer,), heads=total))
        offset += BLOCKS * page
    group = Group(window=Full(), block_tokens=TOKENS, num_blocks=BLOCKS, views=tuple(views))
    return CacheSpec(dtype="int8", pool_bytes=offset, groups=(group,), shard=shard)


def heads(spec: CacheSpec, pool: np.ndarray, layer: int, block: int) -> np.ndarray:
    """[heads, tokens, bytes] of a block."""
    view = spec.groups[0].views[layer]
    held = view.size("head")
    start = view.offset + block * view.block_stride
    return pool[start : start + held * TOKENS * HEAD].reshape(held, TOKENS, HEAD)


@pytest.mark.parametrize(("there", "here"), [(1, 2), (2, 1), (2, 2), (4, 2), (2, 4)])
def test_each_layer_has_all_heads_that_its_rank_wants(there: int, here: int) -> None:
    sources = [rank(number, there) for number in range(there)]
    random = np.random.default_rng(there * 10 + here)
    whole = [random.integers(1, 100, (total, TOKENS, HEAD), dtype=np.uint8) for total in TOTALS]
    pools = []
    for spec in sources:
        pool = np.zeros(spec.pool_bytes, np.uint8)
        for layer, total in enumerate(TOTALS):
            held = spec.shard.heads(total)
            heads(spec, pool, layer, 3)[:] = whole[layer][held.start : held.stop]
        pools.append(pool)
    for number in range(here):
        ours = rank(number, here)
        got = np.zeros(ours.pool_bytes, np.uint8)
        for share in route(sources, ours).shares:
            check_compatible(sources[share.source], ours)
            span = SpanPair(0, np.array([3], np.uint32), 0, np.array([1], np.uint32))
            for src, dst, length in Planner(sources[share.source], ours, share).plan([span]).copies:
                got[dst : dst + length] = pools[share.source][src : src + length]
        for layer, total in enumerate(TOTALS):
            held = ours.shard.heads(total)
            assert (heads(ours, got, layer, 1) == whole[layer][held.start : held.stop]).all()
