"""SGLang's cache as a spec: pages where its buffers lie, and behind them the records."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvd.engines.sglang.spec import Cache, cache_spec
from kvd.errors import BadRequest
from kvd.layout import Shard
from kvd.limits import MAX_TRANSFER_RECORDS
from kvd.plan import Planner, SpanPair, route
from kvd.plan.compat import check_compatible

GQA = Cache(
    component="kv",
    layers=(0, 1, 2),
    halves=2,
    pages=10,
    page_tokens=4,
    heads=2,
    total_heads=2,
    cell_bytes=8,
    dtype="float32",
    record_bytes=24,
    shard=Shard(stages=((0, 3),)),
)
LATENT = replace(GQA, component="latent", halves=1, heads=1, total_heads=1)


def buffers(cache: Cache, pool: Any) -> Any:
    """The pool as SGLang sees it: [layers, K and V, slots, heads, bytes]."""
    nbytes = len(cache.layers) * cache.layer_bytes
    slots = cache.pages * cache.page_tokens
    return pool[:nbytes].reshape(len(cache.layers), cache.halves, slots, cache.heads, cache.cell_bytes)


def ids(*numbers: int) -> Any:
    return np.array(numbers, np.uint32)


@pytest.mark.parametrize("cache", [GQA, LATENT], ids=["grouped heads", "latent"])
def test_a_pull_brings_the_slots_of_the_pages_in_every_layer_and_the_record(cache: Cache) -> None:
    spec = cache_spec(cache)
    source = np.random.default_rng(0).integers(1, 255, spec.pool_bytes, dtype=np.uint8)
    here = np.zeros_like(source)
    (share,) = route([spec], spec).shares
    spans = [SpanPair(0, ids(2, 5, 9), 1, ids(7, 3)), SpanPair(0, ids(6), 0, ids(1000))]
    for src, dst, length in Planner(spec, spec, share).plan(spans, 12).copies:
        here[dst : dst + length] = source[src : src + length]
    theirs, ours = buffers(cache, source), buffers(cache, here)
    for there, to in ((5, 7), (9, 3)):
        page, target = slice(4 * there, 4 * there + 4), slice(4 * to, 4 * to + 4)
        assert (ours[:, :, target] == theirs[:, :, page]).all()
    assert (here[cache.record(1000)] == source[cache.record(6)]).all()
    moved = 2 * cache.layer_bytes // cache.pages * len(cache.layers) + cache.record_bytes
    assert np.count_nonzero(here) == moved


def rank(number: int, of: int, *, latent: bool) -> Cache:
    """The cache of one rank of so many."""
    cache = LATENT if latent else replace(GQA, heads=2 // of)
    return replace(cache, shard=Shard(stages=((0, 3),), tp_rank=number, tp_size=of))


@pytest.mark.parametrize("latent", [False, True], ids=["grouped heads", "latent"])
@pytest.mark.parametrize(("theirs", "ours"), [(2, 2), (2, 1), (1, 2)])
def test_each_rank_gets_its_heads_and_a_record_from_ranks_that_may_be_more_or_fewer(
    theirs: int, ours: int, latent: bool
) -> None:
    sources = [rank(number, theirs, latent=latent) for number in range(theirs)]
    specs = [cache_spec(cache) for cache in sources]
    pools = [
        np.random.default_rng(0 if latent else seed).integers(1, 255, spec.pool_bytes, dtype=np.uint8)
        for seed, spec in enumerate(specs)
    ]  # all ranks of a latent cache hold the same
    whole = np.concatenate([buffers(cache, pool) for cache, pool in zip(sources, pools, strict=True)], axis=3)
    for number in range(ours):
        cache = rank(number, ours, latent=latent)
        spec = cache_spec(cache)
        here = np.zeros(spec.pool_bytes, np.uint8)
        for share in route(specs, spec).shares:
            spans = [SpanPair(0, ids(5), 0, ids(7)), SpanPair(0, ids(6), 0, ids(1000))]
            for src, dst, length in Planner(specs[share.source], spec, share).plan(spans, 4).copies:
                here[dst : dst + length] = pools[share.source][src : src + length]
        heads = cache.shard.heads(cache.total_heads)
        got = buffers(cache, here)[:, :, 28:32]
        assert (got == whole[:, :, 20:24, heads.start : heads.stop]).all()
        records = [pool[source.record(6)] for pool, source in zip(pools, sources, strict=True)]
        assert any((here[cache.record(1000)] == record).all() for record in records)


def test_the_records_lie_behind_the_buffers() -> None:
    assert GQA.record(0).start >= len(GQA.layers) * GQA.layer_bytes
    assert GQA.record(MAX_TRANSFER_RECORDS - 1).stop == cache_spec(GQA).pool_bytes


def test_engines_whose_records_differ_do_not_fit() -> None:
    ours, theirs = cache_spec(GQA), cache_spec(replace(GQA, record_bytes=32))
    with pytest.raises(BadRequest, match="byte"):
        check_compatible(theirs, ours)
