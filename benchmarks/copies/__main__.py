"""`python -m benchmarks.copies`: ways to copy out of a pool that another process lends, by the size of the pieces."""

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import command
from benchmarks.copies.holes import PLIGHTS, ends
from benchmarks.copies.ways import WAYS, Way
from kvd.bench import report
from kvd.errors import NoMemory
from kvd.limits import KIB, MIB
from kvd.memory.mapping import Mapping
from kvd.memory.memfd import Backing, MemfdPool, MemfdProvider
from kvd.transport.slices import U64
from kvd.units import size as text_of

_POOL: Final = 256 * MIB
_PIECES: Final = tuple(count * KIB for count in (4, 16, 64, 256, 1024, 4096))
_COLD, _WARM = 64 * MIB, 2 * MIB
"""Bytes that are copied in a round: more than caches hold, and about what they do."""
_THREADS: Final = (1, 2)


@dataclass(frozen=True, slots=True)
class Measured:
    """GB/s of each way: the median of its rounds, which took turns with those of the others.

    In seconds of the threads' own time, so that a busy machine matters less.
    """

    backing: str
    piece: int
    caches: str
    threads: int
    rates: dict[str, float]


def measure(backing: Backing, rounds: int) -> Iterator[Measured]:
    """Copies scattered pieces out of one pool, mapped as peers map it, into another one."""
    provider = MemfdProvider(backing)
    source, target = (provider.allocate(f"{side} of copies", _POOL) for side in ("source", "target"))
    lent = Mapping(source.descriptor, _POOL, writable=False)
    rng = np.random.default_rng(0)
    try:
        for piece in _PIECES:
            for caches, total in (("cold", _COLD), ("warm", _WARM)):
                for threads in _THREADS:
                    if total >= piece * threads:
                        pieces = _scattered(rng, target, piece, total // piece)
                        rates = _rates(source.descriptor, lent, pieces, threads, rounds)
                        yield Measured(source.backing, piece, caches, threads, rates)
    finally:
        lent.close()
        source.close()
        target.close()


def _scattered(rng: np.random.Generator, target: MemfdPool, piece: int, count: int) -> tuple[U64, U64, U64]:
    places = [rng.permutation(_POOL // piece)[:count].astype(np.uint64) * np.uint64(piece) for _ in range(2)]
    return np.uint64(target.base) + places[0], places[1], np.full(count, piece, dtype=np.uint64)


def _rates(file: int, lent: Mapping, pieces: tuple[U64, U64, U64], threads: int, rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds + 1):
        for name, way in WAYS.items():
            times[name].append(_timed(way, file, lent, pieces, threads))
    total = int(pieces[2].sum())
    return {name: total / statistics.median(taken[1:]) / 1e9 for name, taken in times.items()}


def _timed(way: Way, file: int, lent: Mapping, pieces: tuple[U64, U64, U64], threads: int) -> float:
    """Seconds of its own that the slowest of the threads takes, which begin together and copy a part each."""
    ready, taken = threading.Barrier(threads), []

    def run(number: int) -> None:
        part = [each[number::threads] for each in pieces]
        ready.wait()
        started = time.thread_time()
        way(file, lent, part[0], part[1], part[2])
        taken.append(time.thread_time() - started)

    running = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for each in running:
        each.start()
    for each in running:
        each.join()
    return max(taken)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = command.make_parser("copies", "Copies scattered pieces out of a pool in each way, in turns.")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each (default: 9)")
    parser.add_argument(
        "--holes", action="store_true", help="show what becomes of who reads where pages were taken away"
    )
    parser.add_argument(
        "--backing",
        nargs="+",
        type=Backing,
        choices=[Backing.HUGETLB, Backing.THP, Backing.PLAIN],
        default=[Backing.THP, Backing.PLAIN],
        help="pages of the pools (default: thp plain)",
    )
    return command.run(parser, _run, arguments)


def _show_holes(args: argparse.Namespace) -> None:
    table = Table("copy by", "when", "how it ends", "is charged", title="copies where a pool lost its pages")
    found = list(ends())
    for end in found:
        table.add_row(end.way, PLIGHTS[end.plight], end.end, end.charged)
    Console().print(table)
    report.write_json(args.json, {"holes": [asdict(end) for end in found]})


def _run(args: argparse.Namespace) -> None:
    if args.holes:
        _show_holes(args)
        return
    table = Table("pages", "pieces", "caches", "threads", *(f"{name} GB/s" for name in WAYS))
    results: list[Measured] = []
    for backing in args.backing:
        try:
            results += measure(backing, args.rounds)
        except NoMemory as error:
            print(f"{backing}: {error.text}", file=sys.stderr)
    for row in results:
        rates = (f"{rate:.1f}" for rate in row.rates.values())
        table.add_row(row.backing, text_of(row.piece), row.caches, str(row.threads), *rates)
    Console().print(table)
    report.write_json(args.json, {"copies": [asdict(row) for row in results]})


if __name__ == "__main__":
    sys.exit(main())
