"""memcpy, raw NIXL and kvd move the same blocks in turns, so that whatever else the machine does hits all three."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from kvd.bench.pair import Pair, Pool
from kvd.limits import KIB, MIB

GIGA = 1e9
_TURN = 4
"""Measurements of one kind in a row, so that each kind starts with cold caches once per turn, not every time."""


@dataclass(frozen=True, slots=True)
class Case:
    """`count` blocks of `block_bytes` bytes per layer, adjacent or scattered over the pools, measured `rounds` times.

    With `cross_layer`, all layers of a block lie together; otherwise all blocks of a layer do.
    """

    block_bytes: int
    count: int
    scattered: bool
    rounds: int
    layers: int = 1
    cross_layer: bool = False

    @property
    def bytes(self) -> int:
        """Bytes moved."""
        return self.block_bytes * self.count * self.layers


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds a case took: the median of its rounds and, for kvd and raw NIXL, the 99th percentile."""

    case: Case
    descriptors: int
    memcpy: float
    raw: float
    raw_p99: float
    kvd: float
    kvd_p99: float

    @property
    def ratio(self) -> float:
        """Kvd's throughput over that of raw NIXL."""
        return self.raw / self.kvd

    @property
    def added(self) -> float:
        """What kvd adds to raw NIXL, in seconds."""
        return self.kvd - self.raw

    def rate(self, seconds: float) -> float:
        """GB/s if the case takes `seconds`."""
        return self.case.bytes / seconds / GIGA

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "bytes": self.case.bytes, "ratio": self.ratio, "added_seconds": self.added}


def cases(*, quick: bool) -> list[Case]:
    """From one 16 KiB block to 256 MiB; 64 MiB in blocks of every size, scattered; and a prompt's in 16 layers."""
    sizes = [(16 * KIB, 1, True)]
    for block_bytes, count in ((16 * KIB, 64), (16 * KIB, 1024), (256 * KIB, 4), (256 * KIB, 64)):
        sizes += [(block_bytes, count, False), (block_bytes, count, True)]
    sizes += [(block_bytes, 64 * MIB // block_bytes, True) for block_bytes in (4 * KIB, 16 * KIB, 64 * KIB)]
    for count in (256, 1024):
        sizes += [(256 * KIB, count, False), (256 * KIB, count, True)]
    prompt = Case(128 * KIB, 38, False, _rounds(38 * 16 * 128 * KIB, quick), layers=16)
    return [
        *(Case(blocks, count, scattered, _rounds(blocks * count, quick)) for blocks, count, scattered in sizes),
        prompt,
    ]


def _rounds(size: int, quick: bool) -> int:
    rounds = max(5, min(400, (2 * 1024 * MIB) // size))
    return max(3, rounds // 10) if quick else rounds


def measure(pair: Pair, chosen: Sequence[Case], progress: Callable[[], None]) -> Iterator[Measured]:
    """Measures the cases; calls `progress` after each."""
    pools: dict[tuple[int, int, bool], Pool] = {}
    rng = np.random.default_rng(0)
    for case in chosen:
        key = case.block_bytes, case.layers, case.cross_layer
        if key not in pools:
            largest = max(other.count for other in chosen if other.block_bytes == case.block_bytes)
            name = f"pool-{len(pools)}"
            pools[key] = pair.pool(name, 2 * largest, case.block_bytes, case.layers, cross_layer=case.cross_layer)
        yield _measure(pools[key], case, rng)
        progress()


def _measure(pool: Pool, case: Case, rng: np.random.Generator) -> Measured:
    source, destination = (_ids(pool, case, rng) for _ in range(2))
    descriptors = pool.descriptors(source, destination)
    tickets = pool.tickets(source, case.rounds + 1)
    pool.raw(descriptors)
    pool.bytes[pool.rows(destination)] = 0
    pool.pull(tickets.pop(), destination)
    pool.check(source, destination)
    times: dict[str, list[float]] = {"memcpy": [], "raw": [], "kvd": []}
    spare, rows = pool.rows(_spare(pool, destination)), pool.rows(destination)
    for start in range(0, len(tickets), _TURN):
        turn = tickets[start : start + _TURN]
        times["memcpy"] += [_memcpy(pool, rows, spare) for _ in turn]
        times["raw"] += [pool.raw(descriptors) for _ in turn]
        times["kvd"] += [pool.pull(ticket, destination) for ticket in turn]
    return Measured(
        case=case,
        descriptors=descriptors.count,
        memcpy=statistics.median(times["memcpy"]),
        raw=statistics.median(times["raw"]),
        raw_p99=_p99(times["raw"]),
        kvd=statistics.median(times["kvd"]),
        kvd_p99=_p99(times["kvd"]),
    )


def _ids(pool: Pool, case: Case, rng: np.random.Generator) -> list[int]:
    if case.scattered:
        return [int(block) for block in rng.permutation(pool.blocks)[: case.count]]
    first = int(rng.integers(0, pool.blocks - case.count + 1))
    return list(range(first, first + case.count))


def _spare(pool: Pool, destination: Sequence[int]) -> list[int]:
    """As many blocks of the same pool that the pull does not write to: where memcpy copies from."""
    taken = set(destination)
    return [block for block in range(pool.blocks) if block not in taken][: len(destination)]


def _memcpy(pool: Pool, destination: Sequence[int], source: Sequence[int]) -> float:
    blocks = pool.bytes
    started = time.perf_counter()
    for there, here in zip(source, destination, strict=True):
        blocks[here] = blocks[there]
    return time.perf_counter() - started


def _p99(times: list[float]) -> float:
    return float(np.quantile(times, 0.99))
