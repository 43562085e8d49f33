"""Routing: which ranks of the producer a rank of the consumer reads, and what of each.

A head that several producer ranks hold is read from one of them. Consumer ranks that want the same head are spread
evenly over its replicas, which for a cache that every rank holds (MLA: one head) is the rule r * R // T of vLLM's
in-process connector. Every rank of the consumer computes the same answer, so producers can know who will come.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvd.errors import BadRequest, ErrorCode
from kvd.layout import CacheSpec, Shard
from kvd.limits import MAX_RANKS


@dataclass(frozen=True, slots=True)
class Part:
    """Global `heads` of one component of one group, in whatever layers both sides hold."""

    group: int
    component: str
    heads: range


@dataclass(frozen=True, slots=True)
class Share:
    """What one destination rank reads of one source rank; `source` is its index among the sources given."""

    source: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Route:
    """Where a destination rank reads, and what every source rank may expect.

    - `shares`: one for each source rank that this destination rank reads, in the order of the sources.
    - `readers`: for every source, how many ranks of the destination's engine read it.
    - `releases`: the sources that nobody reads, and that this destination rank, of all of its engine, answers for.
    """

    shares: tuple[Share, ...]
    readers: tuple[int, ...]
    releases: tuple[int, ...]


def route(sources: Sequence[CacheSpec], destination: CacheSpec) -> Route:
    """How `destination` reads an engine whose ranks declare `sources` (all of them, in any order).

    Compatibility of each pair is not looked at: see `check_compatible`.

    Raises:
        BadRequest: INCOMPATIBLE, if the sources are not each rank of one engine once.

    """
    _check_complete([source.shard for source in sources])
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
        raise BadRequest(ErrorCode.INCOMPATIBLE, f"source ranks: given are {ranks}, the engine has {expected}")
    for shard in shards[1:]:
        if (shard.tp_size, shard.stages) != (shards[0].tp_size, shards[0].stages):
            text = f"source ranks of one engine: {shards[0]} and {shard}"
            raise BadRequest(ErrorCode.INCOMPATIBLE, text)


def _parts(source: CacheSpec, reader: Shard) -> list[Part]:
    """What `reader` reads of `source`: every component that it shares layers with, cut to the heads it reads there."""
    layers = set(reader.layers)
    parts: dict[tuple[int, str], Part] = {}
    for index, group in enumerate(source.groups):
        for view in group.views:
            heads = heads_read(view.heads, source.shard, reader)
            if heads and layers.intersection(view.layers):
                parts[index, view.component] = Part(index, view.component, heads)
    return list(parts.values())


def heads_read(total: int, source: Shard, reader: Shard) -> range:
    """The global heads, of `total`, that `reader` reads from `source`: contiguous, empty if it reads none."""
    held, wanted = source.heads(total), reader.heads(total)
    common = range(max(held.start, wanted.start), min(held.stop, wanted.stop))
    replica, replicas = source.replica(total)
    turn, readers = reader.replica(total)
    return common if turn * replicas // readers == replica else range(0)


def _count_readers(source: CacheSpec, engine: Shard) -> int:
    held = {(view.heads, layer) for group in source.groups for view in group.views for layer in view.layers}
    return sum(_reads(held, source.shard, reader) for reader in engine.every_rank())


def _reads(held: set[tuple[int, int]], source: Shard, reader: Shard) -> bool:
    totals: Iterator[int] = iter({total for total, layer in held if layer in reader.layers})
    return any(heads_read(total, source, reader) for total in totals)
