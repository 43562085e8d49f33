"""Groups with windows, blocks and prefix hits of their own, overlaying one allocation or apart."""

import msgspec
import numpy as np
import pytest

from kvd.errors import BadRequest, ErrorCode
from kvd.layout import Chunked, Full, Sliding, State
from kvd.layout.models import MODELS, LayerKind, Model
from kvd.layout.presets import Attention, Recurrent, Section
from kvd.plan import Planner, SpanPair, route
from kvd.plan.explain import explain
from tests.plan.layout_buffers import engine, model, move, spans_for

HEADS = (Attention(2, 4),)
GEMMA = model(LayerKind(Full(), (2, 5), HEADS), LayerKind(Sliding(24), (0, 1, 3, 4), HEADS))
RECURRENT = Recurrent((Section("q", 4, 2), Section("v", 4, 3)), taps=3, ssm_heads=4, ssm_head_bytes=12)
NEXT = model(LayerKind(Full(), (1,), HEADS), LayerKind(State(), (0, 2), (RECURRENT,)))
THREE = Model("three", (*GEMMA.kinds, LayerKind(Chunked(16), (6, 7), HEADS)))


@pytest.mark.parametrize("overlay", [False, True], ids=["apart", "overlaid"])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 39, 40, 41, 64, 100])
@pytest.mark.parametrize("hybrid", [GEMMA, THREE, NEXT], ids=["sliding", "three kinds", "states"])
def test_each_group_moves_its_own_blocks(hybrid: Model, overlay: bool, tokens: int) -> None:
    sources = engine(hybrid, "packed-hnd", block=16, blocks=64, overlay=overlay)
    (destination,) = engine(hybrid, "packed-hnd", block=16, blocks=64, overlay=overlay)
    assert move(sources, destination, tokens).bytes > 0


def test_a_window_of_24_moves_two_or_three_blocks_of_16_by_alignment() -> None:
    sources, (destination,) = engine(GEMMA, "packed-hnd", block=16), engine(GEMMA, "packed-hnd", block=16)
    blocks = {}
    for tokens in range(32, 80):
        figures = explain(sources, destination, tokens).groups[1]
        blocks[tokens] = figures.blocks
        assert figures.bytes == figures.blocks * 4 * 16 * 2 * 2 * 4
    assert set(blocks.values()) == {2, 3}
    assert blocks[48] == blocks[47] == 2
    assert blocks[49] == 3


def test_gemma_moves_64_or_65_blocks_of_each_sliding_layer_whatever_the_length() -> None:
    sources = engine(MODELS["Gemma-3-27B"], "packed-hnd", block=16, blocks=6250)
    for tokens in (5000, 5001, 99_999, 100_000):
        assert explain(sources, sources[0], tokens).groups[1].blocks in {64, 65}


@pytest.mark.parametrize("hits", [[0, 0], [3, 0], [0, 1], [3, 2], [7, 0], [0, 3], [7, 3]])
def test_prefix_hits_may_differ_by_group(hits: list[int]) -> None:
    sources, (destination,) = engine(GEMMA, "packed-hnd", block=16), engine(GEMMA, "cross-layer-hnd", block=16)
    needed = [len(group.needed(100)) for group in destination.groups]
    assert needed == [7, 3]
    moved = move(sources, destination, 100, hits=hits)
    left = [(need - hit) * group.block_bytes for need, hit, group in zip(needed, hits, destination.groups, strict=True)]
    assert moved.bytes == sum(left)


def test_neighbouring_blocks_of_different_groups_are_joined_where_the_groups_overlay() -> None:
    (spec,) = engine(GEMMA, "cross-layer-hnd", block=16, overlay=True)
    assert len(spec.groups) == 3
    planner = Planner(spec, spec, route([spec], spec).shares[0])
    spans = [SpanPair(0, np.array([block], np.uint32), 0, np.array([block + 9], np.uint32)) for block in (4, 5, 6)]
    plan = planner.plan(spans)
    assert (plan.count, plan.bytes) == (1, sum(group.block_bytes for group in spec.groups))


def test_the_last_state_moves_though_block_sizes_differ() -> None:
    (ours,), (theirs,) = engine(NEXT, "packed-hnd", block=16), engine(NEXT, "packed-hnd", block=16)
    ours, theirs = (_with_state_blocks(spec, size) for spec, size in ((ours, 64), (theirs, 48)))
    spans = spans_for(ours, theirs, 100)
    assert (spans[1].source_first, spans[1].destination_first) == (1, 2)
    planner = Planner(ours, theirs, route([ours], theirs).shares[0])
    assert planner.plan(spans, 100).bytes == 7 * theirs.groups[0].block_bytes + theirs.groups[1].block_bytes
    move([ours], theirs, 100, spans=spans)
    with pytest.raises(BadRequest, match="number of tokens, which is missing"):
        planner.plan(spans)


def _with_state_blocks(spec, size: int):
    groups = (spec.groups[0], msgspec.structs.replace(spec.groups[1], block_tokens=size))
    return msgspec.structs.replace(spec, groups=groups)


def test_checkpoints_of_a_state_move_by_position_like_any_block() -> None:
    (spec,) = engine(NEXT, "packed-hnd", block=16)
    planner = Planner(spec, spec, route([spec], spec).shares[0])
    none = np.empty(0, np.uint32)
    spans = [SpanPair(0, none, 0, none), SpanPair(3, np.array([7, 8], np.uint32), 3, np.array([1, 2], np.uint32))]
    assert planner.plan(spans).bytes == 2 * spec.groups[1].block_bytes


def test_what_is_asked_for_and_not_offered_is_refused_with_both_ranges() -> None:
    (spec,) = engine(GEMMA, "packed-hnd", block=16)
    planner = Planner(spec, spec, route([spec], spec).shares[0])
    five, none = np.arange(5, dtype=np.uint32), np.empty(0, np.uint32)
    for first in (1, 6, 10):
        with pytest.raises(BadRequest, match=rf"groups\[1\]: positions 5 to 10 .* {first} to {first + 5}") as refused:
            planner.plan([SpanPair(0, none, 0, none), SpanPair(first, five, 5, five)])
        assert refused.value.code == ErrorCode.BAD_BLOCKS


def test_a_partly_offered_block_is_refused_where_its_missing_tokens_are_needed() -> None:
    (ours,), (theirs,) = engine(GEMMA, "packed-hnd", block=4), engine(GEMMA, "packed-hnd", block=16)
    planner = Planner(ours, theirs, route([ours], theirs).shares[0])
    none = np.empty(0, np.uint32)
    spans = [SpanPair(1, np.arange(9, dtype=np.uint32), 0, np.arange(2, dtype=np.uint32)), SpanPair(0, none, 0, none)]
    assert planner.plan(spans).count > 0
    with pytest.raises(BadRequest, match="positions 0 to 2 of 16 tokens are asked for, 1 to 10 of 4 tokens"):
        planner.plan(spans, tokens=32)


def test_an_empty_group_moves_nothing() -> None:
    (spec,) = engine(GEMMA, "packed-hnd", block=16)
    planner = Planner(spec, spec, route([spec], spec).shares[0])
    none = np.empty(0, np.uint32)
    plan = planner.plan([SpanPair(0, none, 0, none), SpanPair(0, np.arange(9, dtype=np.uint32), 4, none)], tokens=100)
    assert (plan.count, plan.bytes) == (0, 0)


def test_spans_that_are_not_one_a_group_are_refused() -> None:
    (spec,) = engine(GEMMA, "packed-hnd", block=16)
    with pytest.raises(BadRequest, match="1 spans for 2 groups"):
        Planner(spec, spec, route([spec], spec).shares[0]).plan(
            [SpanPair(0, np.empty(0, np.uint32), 0, np.empty(0, np.uint32))]
        )


@pytest.mark.parametrize(("first", "offered"), [(0, 7), (3, 0)], ids=["its end", "all of it"])
def test_a_block_of_which_a_needed_part_is_missing_is_refused(first: int, offered: int) -> None:
    (ours,), (theirs,) = engine(GEMMA, "packed-hnd", block=4), engine(GEMMA, "packed-hnd", block=16)
    none = np.empty(0, np.uint32)
    blocks = -(-max(offered, 1) * 4 // 16)
    wanted = np.arange(blocks, dtype=np.uint32)
    spans = [SpanPair(first, np.arange(offered, dtype=np.uint32), 0, wanted), SpanPair(0, none, 0, none)]
    with pytest.raises(BadRequest, match=f"positions 0 to {blocks} of 16 tokens are asked for"):
        Planner(ours, theirs, route([ours], theirs).shares[0]).plan(spans, tokens=blocks * 16 if offered else None)


def test_a_state_that_is_not_the_last_is_refused_where_block_sizes_differ() -> None:
    (spec,) = engine(NEXT, "packed-hnd", block=16)
    ours, theirs = _with_state_blocks(spec, 64), _with_state_blocks(spec, 48)
    one, none = np.array([3], np.uint32), np.empty(0, np.uint32)
    spans = [SpanPair(0, none, 0, none), SpanPair(0, one, 2, one)]
    with pytest.raises(BadRequest, match=r"groups\[1\]: positions 2 to 3 of 48 tokens are asked for, 0 to 1 of 64"):
        Planner(ours, theirs, route([ours], theirs).shares[0]).plan(spans, tokens=100)
