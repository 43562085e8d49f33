"""Whole engines in numpy buffers: fill the producer by meaning, move, and compare the consumer by meaning."""

from dataclasses import dataclass, field

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvd.layout import CacheSpec, Shard, State, View
from kvd.layout.models import LayerKind, Model, even_stages, model_spec
from kvd.plan import Descriptors, Planner, SpanPair, check_compatible, route

ORDER = ("layer", "kv", "head", "token", "tap", "channel", "byte")


def engine(
    model: Model, layout: str, *, tp: int = 1, pp: int = 1, cp: int = 1, block: int = 4, blocks: int = 64, **options
):
    """The specs of all ranks of an engine, with `block` tokens of a block on each."""
    shard = Shard(stages=even_stages(model.layers, pp), tp_size=tp, cp_size=cp)
    return [
        model_spec(model, layout, rank, num_blocks=blocks, block_tokens=block, **options) for rank in shard.every_rank()
    ]


def model(*kinds: LayerKind) -> Model:
    return Model("test", kinds)


@dataclass
class Moved:
    """What one consumer rank received: a plan for each source rank it reads."""

    plans: dict[int, Descriptors] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(plan.count for plan in self.plans.values())

    @property
    def bytes(self) -> int:
        return sum(plan.bytes for plan in self.plans.values())

    @property
    def lengths(self) -> set[int]:
        return {length for plan in self.plans.values() for length in plan.length.tolist()}


def scattered(spec: CacheSpec, counts: list[int], seed: int) -> list[np.ndarray]:
    """Ids for every group, in no order, none twice in an arena."""
    random = np.random.default_rng(seed)
    free = {group.arena: random.permutation(group.num_blocks).astype(np.uint32) for group in spec.groups}
    tables = []
    for group, count in zip(spec.groups, counts, strict=True):
        tables.append(free[group.arena][:count])
        free[group.arena] = free[group.arena][count:]
        assert len(tables[-1]) == count
    return tables


def spans_for(source: CacheSpec, destination: CacheSpec, tokens: int, hits: list[int] | None = None) -> list[SpanPair]:
    """All that is needed at `tokens` tokens, less the first `hits[g]` positions that the consumer holds already."""
    offered = [group.needed(tokens) for group in source.groups]
    wanted = [group.needed(tokens) for group in destination.groups]
    wanted = [need[hit:] for need, hit in zip(wanted, hits or [0] * len(wanted), strict=True)]
    source_ids = scattered(source, [len(need) for need in offered], 1)
    destination_ids = scattered(destination, [len(need) for need in wanted], 2)
    return [
        SpanPair(ours.start, ours_ids, theirs.start, theirs_ids)
        for ours, ours_ids, theirs, theirs_ids in zip(offered, source_ids, wanted, destination_ids, strict=True)
    ]


def move(sources, destination, tokens, *, hits=None, spans=None) -> Moved:
    """Move what `destination` needs between real buffers, and hold every byte of its pool to what it should be."""
    spans = spans or spans_for(sources[0], destination, tokens, hits)
    meaning = Meaning(tokens)
    pools = []
    for seed, source in enumerate(sources):
        pools.append(np.random.default_rng(seed).integers(0, 256, source.pool_bytes, dtype=np.uint8))
        for number, span in enumerate(spans):
            meaning.write(source, pools[-1], number, span.source_first, span.source_ids)
    after = np.random.default_rng(99).integers(0, 256, destination.pool_bytes, dtype=np.uint8)
    expected = after.copy()
    for number, span in enumerate(spans):
        size = sources[0].groups[number].block_tokens
        offered = range(span.source_first * size, (span.source_first + len(span.source_ids)) * size)
        meaning.write(destination, expected, number, span.destination_first, span.destination_ids, offered)
    moved = Moved()
    for source in sources:
        check_compatible(source, destination)
    for share in route(sources, destination).shares:
        plan = Planner(sources[share.source], destination, share).plan(spans, tokens)
        moved.plans[share.source] = plan
        for src, dst, length in zip(plan.src.tolist(), plan.dst.tolist(), plan.length.tolist(), strict=True):
            after[dst : dst + length] = pools[share.source][src : src + length]
    assert np.array_equal(after, expected)
    return moved


class Meaning:
    """What every element of a sequence's cache is, wherever it lies: random bytes by global coordinates."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._known: dict[tuple[int, str], np.ndarray] = {}

    def write(self, spec, pool, number, first, ids, offered=None) -> None:
        """Put a group's meaning into the blocks `ids` from position `first`; only `offered` tokens if given."""
        group = spec.groups[number]
        for view in group.views:
            whole = self._whole(spec, number, view)[list(view.layers)][:, :, list(spec.shard.heads(view.heads))]
            for position, block in enumerate(ids.tolist(), start=first):
                here = canonical(pool, view, block)
                if isinstance(group.window, State):
                    here[...] = whole
                    continue
                run = group.held_tokens(spec.shard)
                start = position * group.block_tokens + spec.shard.cp_rank * run
                held = range(start, start + run)
                low = max(held.start, offered.start) if offered is not None else held.start
                high = min(held.stop, offered.stop) if offered is not None else held.stop
                here[:, :, :, low - start : high - start] = whole[:, :, :, low:high]

    def _whole(self, spec: CacheSpec, number: int, view: View) -> np.ndarray:
        key = number, view.component
        if key not in self._known:
            tokens = 1 if isinstance(spec.groups[number].window, State) else self._tokens + 64
            shape = [spec.shard.stages[-1][1], view.size("kv"), view.heads, tokens]
            shape += [view.size(dim) for dim in ("tap", "channel", "byte")]
            seed = [number, *view.component.encode()]
            self._known[key] = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
        return self._known[key]


def canonical(pool: np.ndarray, view: View, block: int) -> np.ndarray:
    """One block of a view as an array whose dimensions are in `ORDER`."""
    strides = {axis.dim: axis.stride for axis in view.axes}
    base = view.offset + block * strides["block"]
    return as_strided(pool[base:], [view.size(dim) for dim in ORDER], [strides.get(dim, 1) for dim in ORDER])
