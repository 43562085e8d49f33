"""Routing: which ranks of the producer a rank of the consumer reads, and what of each.

A head that several producer ranks hold is read from one of them. Consumer ranks that want the same head are spread
evenly over its replicas, which for a cache that every rank holds (MLA: one head) is the rule r * R // T of vLLM's
in-process connector. With context parallelism, ranks with the same heads and other tokens are no replicas: a rank reads
one of those with each run of tokens of which it holds any. Every rank of the consumer computes the same answer, so
producers know which readers to expect.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvd.errors import ErrorCode, refusal
from kvd.layout import CacheSpec, Shard
from kvd.limits import MAX_RANKS, MAX_ROUTE_STEPS


@dataclass(frozen=True, slots=True)
class Part:
    """Global `heads`, of `total`, of one component of one group, in whatever layers both sides hold.

    Layers of one component may have different totals, as a drafter's beside the model's.
    """

    group: int
    component: str
    total: int
    heads: range


@dataclass(frozen=True, slots=True)
class Share:
    """What one destination rank reads of one source rank; `source` is its index among the sources given."""

    source: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Route:
    """Where a destination rank reads, and which readers each source rank expects.

    - `shares`: one for each source rank that this destination rank reads, in the order of the sources.
    - `readers`: for every source, how many ranks of the destination's engine read it.
    - `releases`: the sources that nobody reads and that this destination rank releases for its engine.
    """

    shares: tuple[Share, ...]
    readers: tuple[int, ...]
    releases: tuple[int, ...]


def route(sources: Sequence[CacheSpec], destination: CacheSpec) -> Route:
    """How `destination` reads an engine whose ranks declare `sources` (all of them, in any order).

    Does not check that pairs are compatible: see `check_compatible`.

    Raises:
        BadRequest: INCOMPATIBLE, if the sources are not every rank of one engine once, or the engines have too many
            ranks (`MAX_ROUTE_STEPS`).

    """
    _check_complete([source.shard for source in sources])
    _check_work(sources, destination)
    shard = destination.shard
    shares, readers, releases = [], [], []
    for index, source in enumerate(sources):
        parts = _parts(source, shard)
        if parts:
            shares.append(Share(index, tuple(parts)))
        count = _count_readers(source, shard)
        readers.append(count)
        if not count and source.shard.rank * shard.ranks // source.shard.ranks == shard.rank:
            releases.append(index)
    return Route(tuple(shares), tuple(readers), tuple(releases))


def _check_complete(shards: Sequence[Shard]) -> None:
    ranks = sorted(shard.rank for shard in shards)
    expected = list(range(shards[0].ranks)) if shards else [0]
    if len(shards) > MAX_RANKS or ranks != expected:
        raise refusal(ErrorCode.INCOMPATIBLE, f"source ranks: got {ranks}, the engine has {expected}")
    for shard in shards[1:]:
        if msgspec.structs.replace(shards[0], tp_rank=shard.tp_rank, pp_rank=shard.pp_rank) != shard:
            text = f"source ranks of one engine: {shards[0]} and {shard}"
            raise refusal(ErrorCode.INCOMPATIBLE, text)


def _check_work(sources: Sequence[CacheSpec], destination: CacheSpec) -> None:
    totals = {view.heads for spec in (destination, *sources) for group in spec.groups for view in group.views}
    ranks = destination.shard.ranks
    if len(sources) * ranks * len(totals) > MAX_ROUTE_STEPS:
        text = f"{len(sources)} ranks of the source, {ranks} of the destination, {len(totals)} different head counts"
        raise refusal(ErrorCode.INCOMPATIBLE, f"{text}: their product must be at most {MAX_ROUTE_STEPS}")


def _parts(source: CacheSpec, reader: Shard) -> list[Part]:
    """What `reader` reads of `source`: every component with common layers, cut to the heads read there."""
    layers = set(reader.layers)
    parts: dict[tuple[int, str, int], Part] = {}
    for index, group in enumerate(source.groups):
        for view in group.views:
            heads = heads_read(view.heads, source.shard, reader)
            if heads and layers.intersection(view.layers):
                parts[index, view.component, view.heads] = Part(index, view.component, view.heads, heads)
    return list(parts.values())


def heads_read(total: int, source: Shard, reader: Shard) -> range:
    """The global heads, of `total`, that `reader` reads from `source`: contiguous, empty if it reads none."""
    if not source.shares_tokens(reader):
        return range(0)
    held, wanted = source.heads(total), reader.heads(total)
    common = range(max(held.start, wanted.start), min(held.stop, wanted.stop))
    replica, replicas = source.replica(total)
    turn, readers = reader.replica(total)
    return common if turn * replicas // readers == replica else range(0)


def _count_readers(source: CacheSpec, engine: Shard) -> int:
    stops = [stop for _, stop in engine.stages]
    by_stage: dict[int, set[int]] = {}
    """Head counts of what the source holds, by the reader's pipeline stage that holds it, too."""
    for group in source.groups:
        for view in group.views:
            for stage in {bisect_right(stops, layer) for layer in view.layers}:
                by_stage.setdefault(stage, set()).add(view.heads)
    stages = Counter(frozenset(totals) for totals in by_stage.values())
    return sum(count * _count_in_stage(totals, source.shard, engine) for totals, count in stages.items())


def _count_in_stage(totals: frozenset[int], source: Shard, engine: Shard) -> int:
    """How many ranks of one pipeline stage read heads of these counts from `source`: the same in each stage."""
    ranks: set[int] = set()
    for total in totals:
        held = source.heads(total)
        overlapping = range(held.start * engine.tp_size // total, -(-held.stop * engine.tp_size // total))
        for rank in overlapping:
            reader = Shard(stages=engine.stages, tp_rank=rank, tp_size=engine.tp_size, cp_size=engine.cp_size)
            if heads_read(total, source, reader):
                ranks.add(rank)
    return len(ranks)
