"""`python -m benchmarks.scale`: a daemon with 1,000 simulated peers and 10,000 leases, beside one with hardly any."""

import argparse
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks import command
from benchmarks.scale.run import Measured, run
from kvd.bench import report
from kvd.limits import MIB

SIZES: Final = ((2, 10), (100, 1000), (1000, 10_000))
_TURNS: Final = 3


@dataclass(frozen=True, slots=True)
class Growth:
    """Every size, measured in turns, so that whatever else the machine does hits all."""

    runs: tuple[Measured, ...]

    def of(self, peers: int, figure: Callable[[Measured], float]) -> float:
        """The median over the turns."""
        return statistics.median(figure(run) for run in self.runs if run.peers == peers)

    def ratio(self, figure: Callable[[Measured], float]) -> float:
        """The figure of the largest size over that of the smallest."""
        return self.of(SIZES[-1][0], figure) / self.of(SIZES[0][0], figure)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "status_p99_ratio": self.ratio(lambda run: run.status[1]),
            "pull_p99_ratio": self.ratio(lambda run: run.pull[1]),
            "runs": [asdict(run) for run in self.runs],
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = command.make_parser("scale", "Measures one daemon with up to 1,000 simulated peers and 10,000 leases.")
    parser.add_argument("--quick", action="store_true", help="run a sixth of the rounds")
    return command.run(parser, _measure, arguments)


def _measure(args: argparse.Namespace) -> None:
    with report.progress("turns", _TURNS * len(SIZES)) as advance:
        growth = grow(quick=args.quick, progress=advance)
    Console(width=report.WIDTH).print(table(growth))
    figures = growth.as_dict()
    Console().print(
        f"p99, most peers over fewest: status {figures['status_p99_ratio']:.2f}, pull {figures['pull_p99_ratio']:.2f}"
    )
    report.write_json(args.json, figures)


def grow(*, quick: bool, progress: Callable[[], None]) -> Growth:
    """Measures every size in turns, each in a process of its own: two minutes, or one with `quick`."""
    runs = []
    rounds = 500 if quick else 3000
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as executor:
        for _ in range(_TURNS):
            for peers, leases in SIZES:
                runs.append(executor.submit(run, peers, leases, rounds).result())
                progress()
    return Growth(tuple(runs))


def table(growth: Growth) -> Table:
    """One row per figure, one column per size."""
    columns = [f"{peers} peers, {leases} leases" for peers, leases in SIZES]
    drawn = Table("what", *columns, title=f"one daemon among simulated peers, medians of {_TURNS} turns")
    rows: Sequence[tuple[str, Callable[[Measured], float], str, float]] = (
        ("status, p50", lambda run: run.status[0], "us", 1e6),
        ("status, p99", lambda run: run.status[1], "us", 1e6),
        ("pull of one block, p50", lambda run: run.pull[0], "us", 1e6),
        ("pull of one block, p99", lambda run: run.pull[1], "us", 1e6),
        ("first pull from a peer, p50", lambda run: run.first_pull[0], "us", 1e6),
        ("until every peer was ready", lambda run: run.met_seconds, "ms", 1e3),
        ("longest stall meanwhile", lambda run: run.longest_stall, "ms", 1e3),
        ("processor, when idle", lambda run: run.busy, "%", 100),
        ("memory, simulated peers included", lambda run: run.memory, "MiB", 1 / MIB),
        ("size of a status", lambda run: run.status_bytes, "bytes", 1),
    )
    for what, figure, unit, factor in rows:
        drawn.add_row(what, *(f"{growth.of(peers, figure) * factor:,.1f} {unit}" for peers, _ in SIZES))
    return drawn


if __name__ == "__main__":
    sys.exit(main())
