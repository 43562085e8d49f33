import tracemalloc

import numpy as np
import pytest

from kvd.errors import BadRequest, ErrorCode
from kvd.layout import Axis, CacheSpec, Full, Group, Shard, View
from kvd.layout.models import LayerKind
from kvd.layout.presets import LAYOUTS, Attention
from kvd.limits import MAX_BLOCK_DESCRIPTORS
from kvd.plan import Descriptors, Planner, SpanPair, check_ids, route
from tests.plan.layout_buffers import engine, model
from tests.support.steps import steps

HEADS, HEAD, LAYERS, BLOCK = 8, 4, 3, 4
MODEL = model(LayerKind(Full(), tuple(range(LAYERS)), (Attention(HEADS, HEAD),)))


def planner_between(sources, destination) -> Planner:
    return Planner(sources[0], destination, route(sources, destination).shares[0])


def span(source, destination) -> list[SpanPair]:
    return [SpanPair(0, np.array(source, np.uint32), 0, np.array(destination, np.uint32))]


def test_descriptors_are_unsigned_offsets_with_a_count_and_bytes() -> None:
    (spec,) = engine(MODEL, "packed-hnd")
    plan = planner_between([spec], spec).plan(span([3], [5]))
    page = HEADS * BLOCK * 2 * HEAD
    assert {array.dtype for array in (plan.src, plan.dst, plan.length)} == {np.dtype(np.uint64)}
    assert plan.src.tolist() == [(layer * 64 + 3) * page for layer in range(LAYERS)]
    assert plan.dst.tolist() == [(layer * 64 + 5) * page for layer in range(LAYERS)]
    assert (plan.count, plan.bytes) == (LAYERS, LAYERS * page)


def test_an_empty_plan_has_no_bytes() -> None:
    (spec,) = engine(MODEL, "packed-hnd")
    plan = planner_between([spec], spec).plan(span([], []))
    assert (plan.count, plan.bytes) == (0, 0)


@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (1, 4), (2, 4), (2, 8)])
def test_slices_of_a_wider_consumer_lie_where_vllms_formula_says(ours: int, theirs: int) -> None:
    """base + (r mod T/R) * (L / (T/R)) + b * stride, for the K and V regions of every layer."""
    sources, destinations = engine(MODEL, "flash-hnd", tp=ours), engine(MODEL, "flash-hnd", tp=theirs)
    ratio = theirs // ours
    length = HEADS // ours * BLOCK * HEAD
    for rank, destination in enumerate(destinations):
        (share,) = route(sources, destination).shares
        assert share.source == rank * ours // theirs
        plan = Planner(sources[share.source], destination, share).plan(span([11], [2]))
        regions = [region * 64 * length for region in range(LAYERS * 2)]
        assert plan.src.tolist() == [base + rank % ratio * (length // ratio) + 11 * length for base in regions]
        assert set(plan.length.tolist()) == {length // ratio}


def test_flashinfer_values_lie_half_a_page_behind_the_keys() -> None:
    sources, destinations = engine(MODEL, "flashinfer-hnd"), engine(MODEL, "flashinfer-hnd", tp=2)
    page = 2 * HEADS * BLOCK * HEAD
    plan = planner_between(sources, destinations[1]).plan(span([5], [0]))
    keys = [(layer * 64 + 5) * page + page // 4 for layer in range(LAYERS)]
    assert plan.src.tolist() == [address for key in keys for address in (key, key + page // 2)]


def test_a_descriptor_may_span_the_last_block_of_a_layer_and_the_first_of_the_next() -> None:
    (spec,) = engine(MODEL, "packed-hnd")
    plan = planner_between([spec], spec).plan(span([0, 63], [0, 63]))
    assert plan.count == 2 * LAYERS - (LAYERS - 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_whole_pool_is_one_descriptor(layout: str) -> None:
    (spec,) = engine(MODEL, layout)
    plan = planner_between([spec], spec).plan(span(np.random.default_rng(0).permutation(64), range(64)))
    assert plan.bytes == spec.pool_bytes
    plan = planner_between([spec], spec).plan(span(range(64), range(64)))
    assert (plan.count, plan.bytes) == (1, spec.pool_bytes)


def test_more_descriptors_than_a_transfer_may_have_are_refused_before_they_are_made(monkeypatch) -> None:
    monkeypatch.setattr("kvd.plan.planner.FEW", 0)
    monkeypatch.setattr("kvd.plan.planner.MAX_DESCRIPTORS", 2 * LAYERS - 1)
    (spec,) = engine(MODEL, "packed-hnd")
    with pytest.raises(BadRequest, match=f"at least {2 * LAYERS} descriptors") as refused:
        planner_between([spec], spec).plan(span([1, 5], [9, 2]))
    assert refused.value.code == ErrorCode.TOO_LARGE


def test_a_block_of_more_descriptors_than_are_worth_moving_is_refused() -> None:
    def planner(heads: int, layers: int):
        kind = model(LayerKind(Full(), tuple(range(layers)), (Attention(heads, 2),)))
        ours, theirs = (engine(kind, layout, block=1 << 11, blocks=2) for layout in ("packed-hnd", "packed-nhd"))
        return planner_between(ours, theirs[0])

    assert MAX_BLOCK_DESCRIPTORS == 64 * (1 << 11)
    planner(64, 1)
    with pytest.raises(BadRequest, match="kv: one block would take 262144 descriptors, the limit is 131072") as refused:
        planner(128, 1)
    assert refused.value.code == ErrorCode.INCOMPATIBLE


def test_the_groups_of_a_block_share_the_limit() -> None:
    kinds = [LayerKind(Full(), (layer,), (Attention(64, 2),)) for layer in range(2)]
    ours, theirs = (engine(model(*kinds), layout, block=1 << 11, blocks=2) for layout in ("packed-hnd", "packed-nhd"))
    with pytest.raises(BadRequest, match="all groups: one block would take 262144 descriptors"):
        planner_between(ours, theirs[0])


@pytest.mark.parametrize(("most", "what"), [(64, r"groups\[0\]"), (65, "all groups")])
def test_blocks_that_would_be_cut_into_more_units_than_a_route_may_have_are_refused(monkeypatch, most, what) -> None:
    kinds = [LayerKind(Full(), (layer,), (Attention(1, 2),)) for layer in range(2)]
    ours, theirs = (engine(model(*kinds), "packed-hnd", block=block, blocks=2) for block in (64, 1))
    assert planner_between(ours, theirs[0]).units == 2 * (64 + 1)
    monkeypatch.setattr("kvd.plan.template.MAX_ROUTE_UNITS", most)
    with pytest.raises(BadRequest, match=f"{what}: blocks would be cut into .* choose layouts whose block") as refused:
        planner_between(ours, theirs[0])
    assert refused.value.code == ErrorCode.INCOMPATIBLE


def test_a_plan_of_one_unit_takes_no_memory_for_all_others_of_its_block(monkeypatch) -> None:
    monkeypatch.setattr("kvd.plan.planner.FEW", 0)
    ours, theirs = (engine(MODEL, "packed-hnd", block=block, blocks=2) for block in (1 << 16, 1))
    planner = planner_between(ours, theirs[0])
    planner.plan(span([0], [1]))
    tracemalloc.start()
    planner.plan(span([0], [1]))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 16


@pytest.mark.parametrize("bound", ["_MOST_PAIRS", "_MOST_WRAPS"])
def test_neighbours_are_joined_where_there_are_too_many_ways_to_foresee(monkeypatch, bound: str) -> None:
    ours, theirs = (engine(MODEL, "flash-hnd", block=size)[0] for size in (8, 4))
    blocks = SpanPair(0, np.arange(4, dtype=np.uint32), 0, np.arange(8, dtype=np.uint32))
    foreseen = planner_between([ours], theirs).plan([blocks])
    monkeypatch.setattr(f"kvd.plan.template.{bound}", 0)
    joined = planner_between([ours], theirs).plan([blocks])
    assert foreseen.count == joined.count < 2 * LAYERS * HEADS * len(blocks.destination_ids)
    assert sorted(foreseen.src.tolist()) == sorted(joined.src.tolist())


def test_a_planner_takes_no_step_for_each_run_that_another_may_continue_in() -> None:
    """Tokens of 1,024 bytes apart, and of blocks that step by one byte: an end may meet a start of any other run."""
    runs, blocks = 1024, 2

    def spec(block_tokens: int, *axes: Axis) -> CacheSpec:
        view = View(component="kv", offset=0, axes=(Axis("layer", 1, 0), *axes, Axis("byte", 1, 1)), layers=(0,))
        group = Group(window=Full(), block_tokens=block_tokens, num_blocks=blocks, views=(view,))
        return CacheSpec(dtype="uint8", pool_bytes=view.end, groups=(group,), shard=Shard(stages=((0, 1),)))

    odd = spec(2, Axis("block", blocks, 6 * runs + 1), Axis("token", 2, 3 * runs), Axis("channel", runs, 3))
    even = spec(1, Axis("channel", runs, blocks), Axis("block", blocks, 1), Axis("token", 1, 1))
    planner = planner_between([odd], even)
    assert planner.of_a_block == runs
    assert steps(lambda: planner_between([odd], even)) < 5 * runs


@pytest.mark.parametrize("repeats", [1, 1000])
def test_the_first_block_id_that_a_group_does_not_have_is_named(repeats: int) -> None:
    (spec,) = engine(MODEL, "packed-hnd")
    check_ids(spec.groups[0], np.array([0, 63], np.uint32).tobytes())
    check_ids(spec.groups[0], b"")
    with pytest.raises(BadRequest, match="block id 64 is not below num_blocks = 64") as refused:
        check_ids(spec.groups[0], np.array([1] * repeats + [64, 2, 4_000_000_000], np.uint32).tobytes())
    assert refused.value.code == ErrorCode.BAD_BLOCKS


def test_a_source_block_may_be_read_into_several_blocks() -> None:
    (spec,) = engine(MODEL, "cross-layer-hnd")
    plan: Descriptors = planner_between([spec], spec).plan(span([7, 7], [1, 2]))
    assert sorted(plan.dst.tolist()) == [spec.groups[0].block_bytes, 2 * spec.groups[0].block_bytes]
    assert len(set(plan.src.tolist())) == 1


def test_descriptors_of_copies_are_those_of_their_columns() -> None:
    copies = [(7, 1 << 40, 5), (1 << 63, 0, 3)]
    few = Descriptors.of(copies)
    assert {array.dtype for array in (few.src, few.dst, few.length)} == {np.dtype(np.uint64)}
    assert (few.count, few.bytes) == (2, 8)
    columns = Descriptors(few.src, few.dst, few.length)
    assert (columns.count, columns.bytes, columns.copies) == (2, 8, copies)


def test_ids_may_come_as_they_lie_in_a_message() -> None:
    (spec,) = engine(MODEL, "packed-hnd")
    planner = planner_between([spec], spec)
    for blocks in (1, 40):
        ids = np.random.default_rng(blocks).permutation(64)[:blocks].astype(np.uint32)
        lying = memoryview(ids.tobytes()).cast("I")
        one, other = (planner.plan([SpanPair(0, taken, 0, taken)]) for taken in (ids, lying))
        assert one.copies == other.copies
