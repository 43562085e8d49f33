"""`python -m benchmarks.layouts`: scattered blocks of 80 layers, cross-layer and per layer, by kvd and raw NIXL."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import command
from kvd.bench import report
from kvd.bench.pair import Pair
from kvd.bench.transfers import Case, measure
from kvd.limits import KIB


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = command.make_parser("layouts", "Pulls 64 scattered blocks of 80 layers, cross-layer and per layer.")
    parser.add_argument("--quick", action="store_true", help="run a sixth of the rounds")
    return command.run(parser, _measure, arguments)


def _measure(args: argparse.Namespace) -> None:
    rounds = 5 if args.quick else 30
    cases = [Case(16 * KIB, 64, True, rounds, layers=80, cross_layer=cross_layer) for cross_layer in (False, True)]
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder,
        Pair(Path(folder)) as pair,
        report.progress("layouts", len(cases)) as advance,
    ):
        per_layer, cross_layer = measure(pair, cases, advance)
    speedup = {"kvd": per_layer.kvd / cross_layer.kvd, "raw": per_layer.raw / cross_layer.raw}
    Console(width=report.WIDTH).print(report.transfers_table([per_layer, cross_layer], busy=0))
    Console().print(
        f"cross-layer blocks move {speedup['raw']:.1f} times as fast as per-layer blocks over raw NIXL, "
        f"{speedup['kvd']:.1f} times as fast through kvd"
    )
    figures = {"per_layer": per_layer.as_dict(), "cross_layer": cross_layer.as_dict(), "speedup": speedup}
    report.write_json(args.json, figures)


if __name__ == "__main__":
    sys.exit(main())
