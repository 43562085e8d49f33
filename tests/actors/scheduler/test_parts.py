"""How large plans are cut: each part is small, and together they move what the whole plan moves."""

import random
from array import array

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from kvd import limits, plan
from kvd.actors.runtime.pools import PeerPool
from kvd.actors.scheduler.routes import Source, Told, parts, plan_read
from kvd.bench.spec import flat_spec
from kvd.layout import CacheSpec
from kvd.protocol.types import Span
from tests.actors.stage import ids
from tests.support.steps import steps

BLOCK_TOKENS = 16
MANY = 520_000


def source_of(spec: CacheSpec) -> Source:
    planner = plan.Planner(spec, spec, plan.route([spec], spec).shares[0])
    return Source(0, PeerPool(1, 0, spec.pool_bytes, spec), "peer", 1, planner)


@example(15, 0, 0, 5, False, random.Random(0))  # noqa: S311 - parts that end in the midst of blocks
@given(
    offered=st.integers(1, 40),
    before=st.integers(0, 39),
    read=st.integers(0, 700),
    part=st.integers(1, 30),
    growing=st.booleans(),
    shuffled=st.randoms(use_true_random=False),
)
def test_the_parts_of_a_plan_move_what_the_whole_moves(offered, before, read, part, growing, shuffled) -> None:
    spec = flat_spec(64, 64, layers=2)
    source, groups = source_of(spec), spec.groups
    there, here = (shuffled.sample(range(64), offered) for _ in range(2))
    first = min(before, offered - 1)
    told = Told(offered * BLOCK_TOKENS - 3, (Span(0, 0, ids(*there)),), whole=not growing, read=read if growing else 0)
    wanted = (Span(0, first, ids(*here[first:])),)
    saved, limits.PLANNED_PART = limits.PLANNED_PART, part
    try:
        cut = parts(source, told, wanted, groups)
    finally:
        limits.PLANNED_PART = saved
    whole = plan_read(source, told, told.section, wanted)
    made = [plan_read(source, told, each, wanted) for each in cut]
    assert bytes_of(made) == bytes_of([whole])
    assert all(each.count <= max(part, 2) + 2 for each in made)  # two of a block, and of one more that it ends in


def bytes_of(made: list[plan.Descriptors]) -> list[tuple[int, int]]:
    """From where to where each byte goes."""
    copies = [copy for each in made for copy in each.copies]
    return sorted((src + at, dst + at) for src, dst, length in copies for at in range(0, length, 4))


def test_a_plan_has_so_many_parts_however_many_descriptors_it_may_take_at_most(monkeypatch) -> None:
    tokens = 1 << 16
    spec = flat_spec(2, 16 * tokens)
    block = msgspec.structs.replace(spec.groups[0], block_tokens=tokens)
    monkeypatch.setattr(limits, "PLANNED_PART", 1)
    source = source_of(spec)
    monkeypatch.setattr(source.planner, "most", lambda blocks: blocks * tokens)
    told, wanted = Told(tokens, (Span(0, 0, ids(0)),), whole=True), (Span(0, 0, ids(1)),)
    cut = parts(source, told, wanted, (block,))
    assert len(cut) == limits.MAX_PARTS
    assert [each.stop for each in cut[:-1]] == [each.start for each in cut[1:]]


def test_a_plan_of_520_000_blocks_is_cut_into_parts_without_a_look_at_each_block() -> None:
    spec = flat_spec(2 * MANY, 64)
    source = source_of(spec)
    evens = array("I", range(0, 2 * MANY, 2)).tobytes()
    told = Told(MANY * BLOCK_TOKENS, (Span(0, 0, evens),), whole=True)
    wanted = (Span(0, 0, evens),)
    cut = parts(source, told, wanted, spec.groups)
    assert steps(lambda: parts(source, told, wanted, spec.groups)) < MANY / 500
    counts = [plan_read(source, told, each, wanted).count for each in cut]
    assert sum(counts) == MANY
    assert max(counts) <= limits.PLANNED_PART
