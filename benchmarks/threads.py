"""`python -m benchmarks.threads`: how long each thread works for a pull, waits for a core, and how often."""

import argparse
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks import command
from kvd.bench import report
from kvd.bench.pair import Pair
from kvd.limits import KIB
from kvd.units import size as text_of

_SIZES: Final = ((1, 16 * KIB), (64, 256 * KIB), (256, 256 * KIB))
"""Blocks of a pull, and bytes of a block."""
_UNITS: Final = np.array((1e-3, 1e-3, 1.0))
"""Microseconds on a core and waiting for one, and runs, in units of /proc/PID/task/TID/schedstat."""

Counts = defaultdict[tuple[str, str], NDArray[np.float64]]
"""By process and kind of thread."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What the threads of one kind took for one pull."""

    process: str
    threads: str
    work: float
    """Microseconds on a core."""
    wait: float
    """Microseconds in which they could have run, and others had the cores."""
    runs: float
    """How often they got a core."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One size: medians in microseconds, and what each kind of thread took, raw NIXL's reads left out."""

    blocks: int
    block_bytes: int
    kvd: float
    nixl: float
    taken: tuple[Taken, ...]


def measure(pair: Pair, blocks: int, block_bytes: int, pulls: int) -> Measured:
    """Pulls scattered blocks, one request after the other; then reads the same by raw NIXL."""
    pool = pair.pool(f"p{blocks}x{block_bytes}", 2 * max(blocks, 32), block_bytes)
    rng = np.random.default_rng(0)
    source, target = ([int(block) for block in rng.permutation(pool.blocks)[:blocks]] for _ in range(2))
    for ticket in pool.tickets(source, 20):  # the first touch of memory is slow
        pool.pull(ticket, target)
    pool.check(source, target)
    tickets = pool.tickets(source, pulls)
    processes = {"engine": os.getpid()} | {f"{side}'s daemon": child.pid for side, child in pair.daemons.items()}
    before = _counted(processes)
    kvd = statistics.median([pool.pull(ticket, target) for ticket in tickets])
    after = _counted(processes)
    descriptors = pool.descriptors(source, target)
    nixl = statistics.median([pool.raw(descriptors) for _ in range(pulls)])
    pair.quiet_raw()
    taken = tuple(Taken(*kind, *((after[kind] - before[kind]) / pulls).tolist()) for kind in after)
    return Measured(blocks, block_bytes, kvd * 1e6, nixl * 1e6, taken)


def _counted(processes: Mapping[str, int]) -> Counts:
    """Since each thread has started."""
    sums: Counts = defaultdict(lambda: np.zeros(3))
    for process, number in processes.items():
        for kind, counts in _threads(number):
            sums[process, kind] += _UNITS * counts
    return sums


def _threads(process: int) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Of each its kind and counts."""
    for task in Path(f"/proc/{process}/task").iterdir():
        name = (task / "comm").read_text()
        kind = "main" if task.name == str(process) else "libzmq" if name.startswith("ZMQ") else "other"
        yield kind, np.array((task / "schedstat").read_text().split(), dtype=np.int64)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = command.make_parser("threads", "Counts what each thread does for a pull that nothing runs beside.")
    parser.add_argument("--pulls", type=int, default=400, help="of each size (default: 400)")
    return command.run(parser, _run, arguments)


def _run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder, Pair(Path(folder)) as pair:
        found = [measure(pair, *size, args.pulls) for size in _SIZES]
    for each in found:
        Console(width=report.WIDTH).print(_table(each))
    report.write_json(args.json, {"sizes": [asdict(each) for each in found]})


def _table(measured: Measured) -> Table:
    blocks = f"{measured.blocks} x {text_of(measured.block_bytes)}"
    title = f"{blocks}: {measured.kvd:.0f} us a pull, {measured.nixl:.0f} us by raw NIXL (p50)"
    table = Table("process", "threads", "works, us", "waits for a core, us", "runs", title=title)
    for each in measured.taken:
        if each.work >= 1.0:
            table.add_row(each.process, each.threads, f"{each.work:.0f}", f"{each.wait:.0f}", f"{each.runs:.1f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
