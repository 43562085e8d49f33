"""Specs from the cache of real vLLM workers (0.32, on a CPU), as tests/vllm checks that it reports them."""

from dataclasses import replace

import numpy as np
import pytest

from kvd.engines.vllm.cache.spec import CacheGroup, Pages, WorkerCache, cache_spec
from kvd.errors import BadRequest
from kvd.layout import Full, Shard, Sliding
from kvd.plan import Planner, SpanPair, route

BLOCKS = 8


def attention(layers: tuple[int, ...], *, heads: int = 4, total: int = 4, tokens: int = 32, offset: int = 0) -> Pages:
    """Heads of 32 x bfloat16 for K and for V in LBHNC, as the CPU backend lays them out."""
    cell, page = 128, heads * tokens * 128
    return Pages(
        component="model.layers.*.self_attn.attn",
        layers=layers,
        offset=offset,
        layer_stride=page * BLOCKS,
        block_stride=page,
        head_stride=tokens * cell,
        token_stride=cell,
        heads=heads,
        total_heads=total,
        kernel_tokens=tokens,
        cell_bytes=cell,
        dtype="bfloat16/vec",
        order="split",
    )


def cache(*groups: CacheGroup, layers: int, nbytes: int, tp_rank: int = 0, tp_size: int = 1) -> WorkerCache:
    shard = Shard(stages=((0, layers),), tp_rank=tp_rank, tp_size=tp_size)
    return WorkerCache(nbytes=nbytes, num_blocks=BLOCKS, groups=groups, shard=shard)


def group(*pages: Pages, window=Full(), tokens: int = 32) -> CacheGroup:  # noqa: B008 - a value
    return CacheGroup(window=window, block_tokens=tokens, pages=pages)


def test_a_dense_model_is_one_view_of_heads_with_keys_before_values() -> None:
    spec = cache_spec(cache(group(attention((0, 1))), layers=2, nbytes=2 * BLOCKS * 16384))
    (view,) = spec.groups[0].views
    sizes = [(axis.dim, axis.size, axis.stride) for axis in view.axes]
    assert sizes == [
        ("layer", 2, 131072),
        ("block", 8, 16384),
        ("head", 4, 4096),
        ("kv", 2, 2048),
        ("token", 32, 64),
        ("byte", 64, 1),
    ]
    assert view.end == spec.pool_bytes


def test_groups_of_a_hybrid_model_share_the_pages_of_one_arena() -> None:
    sliding, full = group(attention((0, 1)), window=Sliding(96)), group(attention((2, 3)))
    spec = cache_spec(cache(sliding, full, layers=4, nbytes=2 * BLOCKS * 16384))
    assert [g.window for g in spec.groups] == [Sliding(96), Full()]
    assert {g.arena for g in spec.groups} == {0}


def test_a_pipeline_stage_without_layers_of_the_first_group_says_what_it_holds() -> None:
    spec = cache_spec(cache(group(), group(attention((0, 1)), window=Sliding(96)), layers=2, nbytes=2 * BLOCKS * 16384))
    assert [len(g.views) for g in spec.groups] == [0, 1]
    assert spec.dtype == "bfloat16/vec"


def test_a_latent_is_the_same_on_every_rank() -> None:
    latent = Pages(
        component="model.layers.*.self_attn.attn",
        layers=(0, 1, 2),
        offset=0,
        layer_stride=BLOCKS * 32 * 192,
        block_stride=32 * 192,
        head_stride=192,
        token_stride=192,
        heads=1,
        total_heads=1,
        kernel_tokens=32,
        cell_bytes=192,
        dtype="bfloat16",
    )
    spec = cache_spec(cache(group(latent), layers=3, nbytes=3 * BLOCKS * 32 * 192, tp_rank=1, tp_size=2))
    assert spec.groups[0].views[0].heads == 1
    assert spec.groups[0].block_bytes == 3 * 32 * 192


def test_a_block_of_several_kernel_blocks_has_two_token_axes() -> None:
    pages = replace(attention((0,), tokens=32), block_stride=4 * 16384, layer_stride=BLOCKS * 4 * 16384)
    spec = cache_spec(cache(group(pages, tokens=128), layers=1, nbytes=BLOCKS * 4 * 16384))
    tokens = [(axis.size, axis.stride) for axis in spec.groups[0].views[0].axes if axis.dim == "token"]
    assert tokens == [(4, 16384), (32, 64)]


def test_a_rank_of_two_reads_its_heads_of_a_block_as_one_run_a_layer() -> None:
    producer = cache_spec(cache(group(attention((0, 1))), layers=2, nbytes=2 * BLOCKS * 16384))
    half = attention((0, 1), heads=2)
    consumer = cache_spec(cache(group(half), layers=2, nbytes=2 * BLOCKS * 8192, tp_rank=1, tp_size=2))
    (share,) = route([producer], consumer).shares
    ids = [np.array([block], np.uint32) for block in (3, 5)]
    descriptors = Planner(producer, consumer, share).plan([SpanPair(0, ids[0], 0, ids[1])])
    assert descriptors.length.tolist() == [8192, 8192]
    assert descriptors.src.tolist() == [3 * 16384 + 8192, 131072 + 3 * 16384 + 8192]


@pytest.mark.parametrize(
    ("pages", "text"),
    [
        (replace(attention((0,)), kernel_tokens=24), "kernel blocks of 24"),
        (replace(attention((0,)), token_stride=512), "LBHNC"),
        (
            replace(
                attention((7,)),
            ),
            "layers",
        ),
    ],
)
def test_what_cannot_be_addressed_is_refused(pages: Pages, text: str) -> None:
    with pytest.raises(BadRequest, match=text):
        cache_spec(cache(group(pages), layers=1, nbytes=BLOCKS * 16384))


def test_a_model_without_a_cache_is_refused() -> None:
    with pytest.raises(BadRequest, match="no KV cache"):
        cache_spec(cache(layers=1, nbytes=0))
