"""The part of `kvd bench` that fills a daemon with peers and leases, beside one that has hardly any."""

import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Final

from rich.table import Table

from benchmarks.scale.run import Crowded, run
from kvd.limits import MIB

SIZES: Final = ((2, 10), (100, 1000), (1000, 10_000))
_TURNS: Final = 3


@dataclass(frozen=True, slots=True)
class Growth:
    """Every size, measured in turns, so that a noisy moment hits all; `worst` is the largest over the smallest size."""

    runs: tuple[Crowded, ...]

    def of(self, peers: int, figure: Callable[[Crowded], float]) -> float:
        """The median over the turns."""
        return statistics.median(figure(run) for run in self.runs if run.peers == peers)

    def ratio(self, figure: Callable[[Crowded], float]) -> float:
        """How many times as much the largest size has as the smallest."""
        return self.of(SIZES[-1][0], figure) / self.of(SIZES[0][0], figure)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "status_p99_ratio": self.ratio(lambda run: run.status[1]),
            "pull_p99_ratio": self.ratio(lambda run: run.pull[1]),
            "runs": [asdict(run) for run in self.runs],
        }


def steps() -> int:
    """How often `grow` calls its `progress`."""
    return _TURNS * len(SIZES)


def grow(*, quick: bool, progress: Callable[[], None]) -> Growth:
    """Measures every size, in turns, each in a process of its own: two minutes, half of it with `quick`."""
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
    """One row a figure, one column a size."""
    columns = [f"{peers} peers, {leases} leases" for peers, leases in SIZES]
    drawn = Table("what", *columns, title=f"a daemon and its crowd, medians of {_TURNS} turns")
    rows: Sequence[tuple[str, Callable[[Crowded], float], str, float]] = (
        ("status, p50", lambda run: run.status[0], "us", 1e6),
        ("status, p99", lambda run: run.status[1], "us", 1e6),
        ("pull of one block, p50", lambda run: run.pull[0], "us", 1e6),
        ("pull of one block, p99", lambda run: run.pull[1], "us", 1e6),
        ("first pull from a peer, p50", lambda run: run.first_pull[0], "us", 1e6),
        ("until every peer was met", lambda run: run.met_seconds, "ms", 1e3),
        ("longest stall meanwhile", lambda run: run.longest_stall, "ms", 1e3),
        ("processor, with nothing asked", lambda run: run.busy, "%", 100),
        ("memory, crowd included", lambda run: run.memory, "MiB", 1 / MIB),
        ("a status", lambda run: run.status_bytes, "bytes", 1),
    )
    for what, figure, unit, factor in rows:
        drawn.add_row(what, *(f"{growth.of(peers, figure) * factor:,.1f} {unit}" for peers, _ in SIZES))
    return drawn
