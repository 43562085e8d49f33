"""SGLang's cache as a spec: pages where its buffers lie, and behind them the records."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvd.engines.sglang.spec import Cache, cache_spec
from kvd.errors import BadRequest
from kvd.layout import Shard
from kvd.limits import MAX_TRANSFER_RECORDS
from kvd.plan import Planner, Span, route
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
    spans = [Span(0, ids(2, 5, 9), 1, ids(7, 3)), Span(0, ids(6), 0, ids(1000))]
    for src, dst, length in Planner(spec, spec, share).plan(spans, 12).copies:
        here[dst : dst + length] = source[src : src + length]
    theirs, ours = buffers(cache, source), buffers(cache, here)
    for there, to in ((5, 7), (9, 3)):
        page, target = slice(4 * there, 4 * there + 4), slice(4 * to, 4 * to + 4)
        assert (ours[:, :, target] == theirs[:, :, page]).all()
    assert (here[cache.record(1000)] == source[cache.record(6)]).all()
    moved = 2 * cache.layer_bytes // cache.pages * len(cache.layers) + cache.record_bytes
    assert np.count_nonzero(here) == moved


def test_the_records_lie_behind_the_buffers() -> None:
    assert GQA.record(0).start >= len(GQA.layers) * GQA.layer_bytes
    assert GQA.record(MAX_TRANSFER_RECORDS - 1).stop == cache_spec(GQA).pool_bytes


def test_engines_whose_records_differ_do_not_fit() -> None:
    ours, theirs = cache_spec(GQA), cache_spec(replace(GQA, record_bytes=32))
    with pytest.raises(BadRequest, match="byte"):
        check_compatible(theirs, ours)
