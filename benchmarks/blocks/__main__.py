"""`python -m benchmarks.blocks`: how long others wait for a daemon while hundreds of thousands of blocks move."""

import argparse
import io
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import command
from benchmarks.blocks.turns import turns
from kvd.bench import report
from kvd.bench.pair import Pair
from kvd.processes import Child, Processes

_BLOCK_BYTES = 64
"""Small, so that what is done for each block takes longest."""


@dataclass(frozen=True, slots=True)
class Waited:
    """Seconds that statuses of one daemon took, asked for by another worker, while something was done."""

    daemon: str
    beside: str
    statuses: int
    p50: float
    p99: float
    worst: float


class _Watcher:
    """Watches one daemon from a process of its own."""

    def __init__(self, daemon: str, socket: Path, processes: Processes) -> None:
        self._daemon = daemon
        self._child: Child = processes.start(f"watcher-{daemon}", "benchmarks.blocks.watcher", str(socket), piped=True)
        self._output = io.BufferedReader(io.FileIO(self._child.source, closefd=False))
        self.waited("its start")

    def waited(self, beside: str) -> Waited:
        """What it has seen since it was asked last."""
        self._child.write(b"\n")
        line = self._output.readline()
        if not line:
            raise self._child.ended()
        times = json.loads(line)
        p50, p99, worst = (float(np.quantile(times, each)) for each in (0.5, 0.99, 1.0))
        return Waited(self._daemon, beside, len(times), p50, p99, worst)


def measure(blocks: int, rounds: int) -> tuple[list[Waited], list[float]]:
    """What others waited for both daemons beside nothing, and beside pulls; and the seconds of each pull."""
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder,
        Pair(Path(folder)) as pair,
        Processes(Path(folder)) as processes,
    ):
        pool = pair.pool("many", 2 * blocks, _BLOCK_BYTES)
        ids = [int(block) for block in np.random.default_rng(0).permutation(2 * blocks)]
        source, target = ids[:blocks], ids[blocks:]
        pool.pull(pool.tickets(source, 1)[0], target)  # warm-up: the first touch of memory is slow
        pool.check(source, target)
        watchers = [_Watcher(name, socket, processes) for name, socket in pair.sockets.items()]
        time.sleep(2.0)
        waited = [watcher.waited("nothing") for watcher in watchers]
        seconds = [pool.pull(pool.tickets(source, 1)[0], target) for _ in range(rounds)]
        waited += [watcher.waited(f"offers and pulls of {blocks:,} blocks") for watcher in watchers]
    return waited, seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = command.make_parser("blocks", "Pulls many small scattered blocks, and watches how long others wait.")
    parser.add_argument("--blocks", type=int, default=520_000, help="blocks of a pull (default: 520,000)")
    parser.add_argument("--rounds", type=int, default=10, help="pulls (default: 10)")
    return command.run(parser, _run, arguments)


def _run(args: argparse.Namespace) -> None:
    steps = list(turns(args.blocks))
    table = Table("on the loop", "ms", title=f"processor time for {args.blocks:,} blocks")
    for what, taken in steps:
        table.add_row(what, f"{taken * 1e3:.2f}")
    Console().print(table)
    waited, seconds = measure(args.blocks, args.rounds)
    table = Table("daemon", "beside", "statuses", "p50 ms", "p99 ms", "worst ms", title="status, asked by others")
    for each in waited:
        figures = (f"{value * 1e3:.2f}" for value in (each.p50, each.p99, each.worst))
        table.add_row(each.daemon, each.beside, str(each.statuses), *figures)
    Console().print(table)
    Console().print(f"one pull of {args.blocks:,} blocks takes {np.median(seconds) * 1e3:.0f} ms (median)")
    report.write_json(args.json, {"loop": dict(steps), "waited": [asdict(each) for each in waited], "pulls": seconds})


if __name__ == "__main__":
    sys.exit(main())
