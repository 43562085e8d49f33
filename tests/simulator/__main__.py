"""`python -m tests.simulator`: runs simulated worlds by seed, checks the promises, shows the trace of a violation."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.simulator.run import Result, run_seed
from tests.simulator.traffic.pieces import ON, WAITING, Piece

_TAIL = 60
"""Lines of the trace that are shown before a violation."""
_CHUNK = 20
"""Seeds given to a process at a time."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the seeds; returns 1 if one of them breaks a promise."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description="Simulates fleets by seed.")
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds (default 500)")
    parser.add_argument("--from", dest="start", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--seed", type=int, help="only this seed")
    parser.add_argument("--trace", action="store_true", help="print the whole trace (with --seed)")
    parser.add_argument(
        "--with",
        dest="also",
        metavar="PIECE",
        type=Piece,
        choices=list(Piece),
        action="append",
        default=[],
        help="also generate one of these: " + ", ".join(sorted(WAITING)),
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes to use (default 1)")
    args = parser.parse_args(arguments)
    console, pieces = Console(), ON | set(args.also)
    if args.seed is not None:
        return _show(console, run_seed(args.seed, pieces=pieces), whole=args.trace)
    pulls: dict[str, int] = {}
    sequences = 0
    with _progress(console, args.seeds) as advance:
        for result in _results(range(args.start, args.start + args.seeds), args.jobs, pieces):
            advance()
            if result.violations:
                return _show(console, run_seed(result.seed, pieces=pieces), whole=False)
            sequences += result.sequences
            for outcome, count in result.outcomes.items():
                pulls[outcome] = pulls.get(outcome, 0) + count
    ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(pulls.items(), key=lambda item: -item[1]))
    console.print(f"{args.seeds} seeds from {args.start}: no promise broken. {sequences} sequences; pulls: {ended}.")
    return 0


def _results(seeds: range, jobs: int, pieces: frozenset[Piece]) -> Iterator[Result]:
    without_trace = partial(run_seed, keep_trace=False, pieces=pieces)
    if jobs == 1:
        yield from map(without_trace, seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(without_trace, seeds, chunksize=_CHUNK)


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[], None]]:
    columns = (TextColumn("seeds"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("seeds", total=total)
        yield lambda: progress.advance(task)


def _show(console: Console, result: Result, *, whole: bool) -> int:
    lines = result.trace if whole or not result.violations else result.trace[: _end(result)][-_TAIL:]
    if whole or result.violations:
        for line in lines:
            console.print(_readable(line), markup=False, highlight=False, soft_wrap=True)
    for violation in result.violations:
        console.print(violation, markup=False, style="red", soft_wrap=True)
    verdict = f"{len(result.violations)} violations" if result.violations else "no promise broken"
    console.print(f"seed {result.seed}: {verdict}; trace {result.trace_hash}; see it with --seed {result.seed} --trace")
    return 1 if result.violations else 0


def _end(result: Result) -> int:
    """The index after the first violation."""
    return next(index for index, line in enumerate(result.trace) if line[1] == "VIOLATION") + 1


def _readable(line: tuple[object, ...]) -> str:
    """A line of the trace with its frame decoded."""
    words = list(line[1:])
    if words and isinstance(words[-1], bytes):
        try:
            words[-1] = msgspec.msgpack.decode(words[-1])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            words[-1] = words[-1].hex()
    return f"{line[0]:9.4f}  " + " ".join(str(word) for word in words)


if __name__ == "__main__":
    sys.exit(main())
