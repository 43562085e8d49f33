"""The caches of two engines with one model: what is pulled from one lies where the other reads it."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.engines.identity import KV, LATENT
from kvd.engines.sglang.spec import Cache
from kvd.engines.sglang.spec import cache_spec as sglang_spec
from kvd.engines.vllm.cache.spec import CacheGroup, Order, Pages, WorkerCache
from kvd.engines.vllm.cache.spec import cache_spec as vllm_spec
from kvd.errors import BadRequest
from kvd.layout import CacheSpec, Full, Shard
from kvd.plan import Planner, SpanPair, align, check_compatible, route

LAYERS, HEADS, CHANNELS, WIDTH = 3, 2, 8, 4
BLOCKS = 12
"""Of either side."""

SHARD = Shard(stages=((0, LAYERS),))
Content = Any
"""An array [layer, K or V, head, token, channel] of what a sequence's tokens have, in float32."""


def vllm(tokens: int, order: Order, *, dtype: str = "float32") -> CacheSpec:
    """A vLLM whose kernel blocks are its blocks, of so many tokens."""
    cell = 2 * CHANNELS * WIDTH
    page = HEADS * tokens * cell
    pages = Pages(
        component=KV,
        layers=tuple(range(LAYERS)),
        offset=0,
        layer_stride=BLOCKS * page,
        block_stride=page,
        head_stride=tokens * cell,
        token_stride=cell,
        heads=HEADS,
        total_heads=HEADS,
        kernel_tokens=tokens,
        cell_bytes=cell,
        dtype=dtype,
        order=order,
        element_bytes=WIDTH,
    )
    group = CacheGroup(window=Full(), block_tokens=tokens, pages=(pages,))
    return vllm_spec(WorkerCache(nbytes=LAYERS * BLOCKS * page, num_blocks=BLOCKS, groups=(group,), shard=SHARD))


def sglang(tokens: int) -> CacheSpec:
    """An SGLang with pages of so many tokens."""
    return sglang_spec(
        Cache(
            component=KV,
            layers=tuple(range(LAYERS)),
            halves=2,
            pages=BLOCKS,
            page_tokens=tokens,
            heads=HEADS,
            total_heads=HEADS,
            cell_bytes=CHANNELS * WIDTH,
            dtype="float32",
            record_bytes=24,
            shard=SHARD,
        )
    )


def as_vllm_by_dimension(pool: Any, tokens: int) -> tuple[Any, Any]:
    """Keys [layer, block, head, channel, token] and values [layer, block, head, token, channel] of vLLM's kernels."""
    halves = pool.view(np.float32).reshape(LAYERS, BLOCKS, HEADS, 2, tokens * CHANNELS)
    keys = halves[:, :, :, 0].reshape(LAYERS, BLOCKS, HEADS, CHANNELS, tokens)
    return keys, halves[:, :, :, 1].reshape(LAYERS, BLOCKS, HEADS, tokens, CHANNELS)


def as_sglang(pool: Any, tokens: int) -> Any:
    """[layer, K or V, slot, head, channel], as SGLang's buffers."""
    floats = LAYERS * 2 * BLOCKS * tokens * HEADS * CHANNELS
    return pool[: floats * WIDTH].view(np.float32).reshape(LAYERS, 2, BLOCKS * tokens, HEADS, CHANNELS)


def get(kind: str, pool: Any, tokens: int, block: int, place: int) -> Any:
    """What the token at `place` of a block has: [layer, K or V, head, channel]."""
    if kind == "sglang":
        return as_sglang(pool, tokens)[:, :, block * tokens + place]
    if kind == "rows":
        cells = pool.view(np.float32).reshape(LAYERS, BLOCKS, HEADS, tokens, 2, CHANNELS)
        return cells[:, block, :, place].transpose(0, 2, 1, 3)
    keys, values = as_vllm_by_dimension(pool, tokens)
    return np.stack([keys[:, block, :, :, place], values[:, block, :, place]], axis=1)


SPECS = {
    "sglang": sglang,
    "rows": lambda tokens: vllm(tokens, "rows"),
    "dimensions": lambda tokens: vllm(tokens, "dimensions"),
}


@given(
    kinds=st.tuples(st.sampled_from(sorted(SPECS)), st.sampled_from(sorted(SPECS))),
    sizes=st.sampled_from([(4, 4), (2, 4), (8, 4), (8, 2), (2, 8)]),
    length=st.integers(1, 16),
    seed=st.integers(0, 99),
)
def test_every_token_has_its_keys_and_values_on_the_other_side(
    kinds: tuple[str, str], sizes: tuple[int, int], length: int, seed: int
) -> None:
    source, destination = (SPECS[kind](tokens) for kind, tokens in zip(kinds, sizes, strict=True))
    theirs, ours = align(source, destination)
    check_compatible(theirs, ours)
    random = np.random.default_rng(seed)
    tables = [random.permutation(BLOCKS)[: -(-length // tokens)].astype(np.uint32) for tokens in sizes]
    (share,) = route([theirs], ours).shares
    planner = Planner(theirs, ours, share)
    none = np.empty(0, np.uint32)
    spans = [SpanPair(0, tables[0], 0, tables[1])] + [SpanPair(0, none, 0, none)] * (planner.groups - 1)
    there = random.integers(0, 1 << 8, source.pool_bytes, dtype=np.uint8)
    here = np.zeros(destination.pool_bytes, dtype=np.uint8)
    for src, dst, nbytes in planner.plan(spans, length).copies:
        here[dst : dst + nbytes] = there[src : src + nbytes]
    for token in range(length):
        (block, place), (target, spot) = (divmod(token, tokens) for tokens in sizes)
        wanted = get(kinds[0], there, sizes[0], int(tables[0][block]), place)
        got = get(kinds[1], here, sizes[1], int(tables[1][target]), spot)
        assert got.tobytes() == wanted.tobytes()


def test_equal_layouts_move_in_runs_as_long_as_before_they_are_told_number_by_number() -> None:
    spec = vllm(4, "dimensions")
    assert align(spec, spec) == (spec, spec)
    (share,) = route([spec], spec).shares
    ids = [np.array([block], np.uint32) for block in (3, 5)]
    lengths = Planner(spec, spec, share).plan([SpanPair(0, ids[0], 0, ids[1])]).length.tolist()
    assert lengths == [HEADS * 4 * 2 * CHANNELS * WIDTH] * LAYERS


def test_keys_that_only_their_kernels_can_read_are_refused_with_both_formats() -> None:
    packed = vllm(4, "split", dtype="float32/CPU_ATTN/amx/packed by 4 tokens")
    with pytest.raises(BadRequest, match=r"dtype: source has float32/CPU_ATTN/amx/packed by 4 tokens, destination has"):
        check_compatible(*align(packed, sglang(4)))


def test_records_are_refused_by_an_engine_that_has_none() -> None:
    theirs, ours = align(vllm(4, "rows"), sglang(4))
    (share,) = route([theirs], ours).shares
    block, none = np.array([1], np.uint32), np.empty(0, np.uint32)
    with pytest.raises(BadRequest, match=r"groups\[1\]: positions 0 to 1 .* are asked for, 0 to 0"):
        Planner(theirs, ours, share).plan([SpanPair(0, block, 0, block), SpanPair(0, none, 0, block)])


def test_a_group_that_one_side_lacks_is_refused_unless_it_lies_beside_the_cache() -> None:
    two = vllm(4, "rows")
    two = CacheSpec(dtype=two.dtype, pool_bytes=two.pool_bytes, groups=(two.groups[0], two.groups[0]), shard=two.shard)
    for pair in ((two, vllm(4, "rows")), (vllm(4, "rows"), two)):
        with pytest.raises(BadRequest, match="number of groups"):
            check_compatible(*align(*pair))


def test_latents_and_heads_do_not_fit() -> None:
    latent = Cache(
        component=LATENT,
        layers=tuple(range(LAYERS)),
        halves=1,
        pages=BLOCKS,
        page_tokens=4,
        heads=1,
        total_heads=1,
        cell_bytes=CHANNELS * WIDTH,
        dtype="float32",
        record_bytes=24,
        shard=SHARD,
    )
    with pytest.raises(BadRequest, match=r"components: source has \['latent'\], destination has \['kv'\]"):
        check_compatible(*align(sglang_spec(latent), sglang(4)))
