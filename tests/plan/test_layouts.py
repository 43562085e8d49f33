"""What each layout saves or costs: numbers of descriptors in transfers between real buffers."""

import numpy as np
import pytest

from kvd.layout import Axis, CacheSpec, Full, Group, Shard, View
from kvd.layout.models import LayerKind
from kvd.layout.presets import Attention
from kvd.plan import Planner, SpanPair, route
from tests.plan.layout_buffers import engine, model, move

LAYERS, HEADS, HEAD, BLOCK = 4, 8, 4, 4
MODEL = model(LayerKind(Full(), tuple(range(LAYERS)), (Attention(HEADS, HEAD),)))
TOKENS, BLOCKS = 17, 5


def far_apart(count: int = BLOCKS) -> list[SpanPair]:
    """Ascending on one side and descending on the other: no two blocks are neighbours on both."""
    ids = np.arange(1, count + 1, dtype=np.uint32)
    return [SpanPair(0, ids, 0, ids[::-1])]


def count(producer: str, consumer: str, *, ours: int = 1, theirs: int = 1, rank: int = 0) -> int:
    sources, destinations = engine(MODEL, producer, tp=ours), engine(MODEL, consumer, tp=theirs)
    return move(sources, destinations[rank], TOKENS, spans=far_apart()).count


def test_flash_attention_takes_two_descriptors_a_layer_and_block() -> None:
    assert count("flash-hnd", "flash-hnd") == 2 * LAYERS * BLOCKS
    assert count("flash-nhd", "flash-nhd") == 2 * LAYERS * BLOCKS


def test_flashinfer_keeps_k_and_v_in_one_block_and_takes_one() -> None:
    assert count("flashinfer-hnd", "flashinfer-hnd") == LAYERS * BLOCKS


@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (2, 1), (1, 8), (8, 1), (4, 2)])
def test_flashinfer_blocks_are_cut_by_heads_in_both_halves(ours: int, theirs: int) -> None:
    reads = max(1, ours // theirs)
    assert count("flashinfer-hnd", "flashinfer-hnd", ours=ours, theirs=theirs) == reads * 2 * LAYERS * BLOCKS


def test_packed_heads_are_cut_without_splitting_k_from_v() -> None:
    assert count("packed-hnd", "packed-hnd", ours=1, theirs=2) == LAYERS * BLOCKS


def test_a_cross_layer_block_is_one_descriptor() -> None:
    for layout in ("cross-layer-hnd", "cross-layer-nhd", "cross-layer-packed-hnd", "cross-layer-heads-outside"):
        assert count(layout, layout) == BLOCKS


def test_cross_layer_blocks_with_heads_outside_layers_are_cut_by_rank_without_splitting() -> None:
    assert count("cross-layer-heads-outside", "cross-layer-heads-outside", ours=1, theirs=4) == BLOCKS
    assert count("cross-layer-packed-hnd", "cross-layer-packed-hnd", ours=1, theirs=4) == LAYERS * BLOCKS


def test_neighbouring_cross_layer_blocks_become_one_descriptor() -> None:
    sources, (destination,) = engine(MODEL, "cross-layer-hnd"), engine(MODEL, "cross-layer-hnd")
    together = [SpanPair(0, np.array([3, 4, 5, 9, 10], np.uint32), 0, np.array([7, 8, 9, 1, 2], np.uint32))]
    assert move(sources, destination, TOKENS, spans=together).count == 2


def test_neighbours_are_joined_in_whatever_order_the_sequence_has_them() -> None:
    sources, (destination,) = engine(MODEL, "cross-layer-hnd"), engine(MODEL, "cross-layer-hnd")
    backwards = np.array([9, 8, 7, 6, 5], np.uint32)
    assert move(sources, destination, TOKENS, spans=[SpanPair(0, backwards, 0, backwards + 20)]).count == 1


@pytest.mark.parametrize("layout", ["flash-hnd", "flashinfer-hnd", "packed-nhd"])
def test_cross_layer_and_per_layer_blocks_map_to_each_other(layout: str) -> None:
    pieces = 2 if layout.startswith("flash-") else 1
    cross = {"packed-nhd": "cross-layer-packed-nhd"}.get(layout, "cross-layer-hnd")
    assert count(layout, cross) == pieces * LAYERS * BLOCKS
    assert count(cross, layout) == pieces * LAYERS * BLOCKS


def test_nhd_against_hnd_takes_a_descriptor_a_head_and_token() -> None:
    assert count("flash-nhd", "flash-hnd") == 2 * LAYERS * BLOCKS * BLOCK * HEADS
    assert count("packed-hnd", "packed-nhd") == LAYERS * BLOCKS * BLOCK * HEADS


@pytest.mark.parametrize(("ours", "theirs"), [(16, 4), (4, 16), (8, 4), (4, 8)])
@pytest.mark.parametrize("layout", ["flash-nhd", "flash-hnd", "cross-layer-hnd", "flashinfer-nhd"])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 31, 32, 33])
def test_block_sizes_may_differ_by_a_whole_factor_either_way(layout: str, ours: int, theirs: int, tokens: int) -> None:
    sources, (destination,) = engine(MODEL, layout, block=ours), engine(MODEL, layout, block=theirs)
    units = -(-tokens // min(ours, theirs)) if ours < theirs else -(-tokens // theirs)
    assert move(sources, destination, tokens).bytes == units * min(ours, theirs) * LAYERS * 2 * HEADS * HEAD


def test_of_a_last_partial_block_whole_blocks_of_the_smaller_size_move() -> None:
    """Refused by vLLM's connector: the producer's blocks are the larger."""
    sources, (destination,) = engine(MODEL, "flash-nhd", block=16), engine(MODEL, "flash-nhd", block=4)
    assert move(sources, destination, 17).bytes == 5 * destination.groups[0].block_bytes
    sources, (destination,) = engine(MODEL, "flash-nhd", block=4), engine(MODEL, "flash-nhd", block=16)
    assert move(sources, destination, 17).bytes == 5 * sources[0].groups[0].block_bytes


def test_the_small_blocks_of_one_large_block_are_joined_where_they_are_neighbours() -> None:
    sources, (destination,) = engine(MODEL, "packed-nhd", block=16), engine(MODEL, "packed-nhd", block=4)
    spans = [SpanPair(0, np.array([3], np.uint32), 0, np.array([8, 9, 10, 11], np.uint32))]
    assert move(sources, destination, 16, spans=spans).count == LAYERS


@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (2, 1), (2, 4), (4, 2), (3, 2)])
def test_pipeline_ranks_that_hold_different_layers_read_each_other(ours: int, theirs: int) -> None:
    """Refused by vLLM's connector: pipeline stages with pull."""
    sources, destinations = engine(MODEL, "flash-hnd", pp=ours, tp=2), engine(MODEL, "cross-layer-hnd", pp=theirs)
    for destination in destinations:
        moved = move(sources, destination, TOKENS)
        assert moved.bytes == BLOCKS * destination.groups[0].block_bytes
        stages = {sources[source].shard.pp_rank for source in moved.plans}
        layers = set(destination.shard.layers)
        assert stages == {source.shard.pp_rank for source in sources if layers & set(source.shard.layers)}


def test_blocks_of_several_kernel_blocks_map_to_plain_ones() -> None:
    ours, (theirs,) = kernel_blocks(pages=4, kernel=4), engine(MODEL, "packed-hnd", block=8)
    assert move_bytes(ours, theirs, 30) == 4 * theirs.groups[0].block_bytes
    assert move_bytes(theirs, ours, 30) == 2 * ours.groups[0].block_bytes


def kernel_blocks(pages: int, kernel: int, blocks: int = 16) -> CacheSpec:
    """Blocks of `pages` kernel blocks, each [heads, kernel tokens, K and V]."""
    page = HEADS * kernel * 2 * HEAD
    axes = (
        Axis("layer", LAYERS, blocks * pages * page),
        Axis("block", blocks, pages * page),
        Axis("token", pages, page),
        Axis("head", HEADS, kernel * 2 * HEAD),
        Axis("token", kernel, 2 * HEAD),
        Axis("kv", 2, HEAD),
        Axis("byte", HEAD, 1),
    )
    view = View(component="kv", offset=0, axes=axes, layers=tuple(range(LAYERS)), heads=HEADS)
    group = Group(window=Full(), block_tokens=pages * kernel, num_blocks=blocks, views=(view,))
    return CacheSpec(dtype="bfloat16", pool_bytes=view.end, groups=(group,), shard=Shard(stages=((0, LAYERS),)))


def move_bytes(source: CacheSpec, destination: CacheSpec, tokens: int) -> int:
    tables = [np.arange(len(spec.groups[0].needed(tokens)), dtype=np.uint32) for spec in (source, destination)]
    planner = Planner(source, destination, route([source], destination).shares[0])
    return planner.plan([SpanPair(0, tables[0], 0, tables[1])], tokens).bytes
