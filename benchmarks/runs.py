"""`python -m benchmarks.runs`: `kvd bench` several times, in turns with another commit's, with 95 % intervals."""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks import command
from benchmarks.estimate import cell, estimate
from kvd.bench import report
from kvd.cli.arguments import at_least
from kvd.errors import ErrorCode, refusal
from kvd.units import size

_HERE: Final = Path(sys.executable).with_name("kvd")

Figures = dict[str, float]
"""By what they are and their unit."""


def figures(document: Mapping[str, Any]) -> Figures:
    """What one run of `kvd bench --json` says: of each size of a pull, beside a large pull, or of small ones."""
    return dict(_figures(document))


def _figures(document: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for row in document.get("transfers", ()):
        case = row["case"]
        blocks = f"{size(row['bytes'])} in {case['count']} x {size(case['block_bytes'])}"
        if (layers := case.get("layers", 1)) > 1:
            blocks += f" for each of {layers} layers"
        name = f"{blocks} {'scattered' if case['scattered'] else 'adjacent'}"
        yield f"{name}: throughput / raw NIXL's", row["ratio"]
        yield f"{name}: a pull, us", row["kvd"] * 1e6
        yield f"{name}: added to raw NIXL, us", row["added_seconds"] * 1e6
    if load := document.get("load"):
        yield "a pull of 1 GiB, ms", load["big_pull"] * 1e3
        yield "status beside it, p99, ms", load["status_p99"] * 1e3
        yield "a pull of one block beside it, us", load["small_beside"] * 1e6
    if rate := document.get("rate"):
        yield "pulls of one block a second", rate["pulls"] / rate["seconds"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = command.make_parser("runs", "Runs `kvd bench` again and again, in turns with another commit's.")
    parser.add_argument("--runs", type=at_least(1), default=5, help="of each (default: 5)")
    parser.add_argument(
        "--beside", type=Path, metavar="KVD", help="the command `kvd` of another checkout's environment"
    )
    parser.add_argument("bench", nargs="*", help="what `kvd bench` is told, after `--`: `-- --busy 4`")
    return command.run(parser, _run, arguments)


def _run(args: argparse.Namespace) -> None:
    sides = {"here": _HERE} | ({"beside": args.beside} if args.beside else {})
    found: dict[str, list[Figures]] = {name: [] for name in sides}
    with report.progress("runs", args.runs * len(sides)) as advance:
        for turn in range(args.runs):
            for name in list(sides)[:: -1 if turn % 2 else 1]:  # neither is always the one after the other
                found[name].append(_measured(sides[name], args.bench))
                advance()
    Console(width=report.WIDTH).print(_table(found))
    report.write_json(args.json, {"bench": args.bench, "runs": found})


def _measured(kvd: Path, bench: Sequence[str]) -> Figures:
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder:
        file = Path(folder) / "figures.json"
        words: list[str | Path] = [kvd.absolute(), "bench", *bench, "--json", file]
        # Each side has its own code: Python would look here, too, for what its processes are.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        try:
            ran = subprocess.run(  # noqa: S603 - the user's
                words, capture_output=True, text=True, env=environment, cwd=folder, check=False
            )
        except OSError as error:
            raise refusal(ErrorCode.BAD_CONFIG, f"{kvd} cannot be run: {error}") from error
        if ran.returncode:
            raise refusal(ErrorCode.INTERNAL, f"{kvd} bench ended with status {ran.returncode}: {ran.stderr.strip()}")
        found = figures(msgspec.json.decode(file.read_bytes())) if file.exists() else {}
    if not found:
        text = f"`kvd bench {shlex.join(bench)}` measures nothing that can be compared: --load, --rate, or neither"
        raise refusal(ErrorCode.BAD_CONFIG, text)
    return found


def _table(found: Mapping[str, Sequence[Figures]]) -> Table:
    here, *others = found.values()
    table = Table("what", *found, *(f"here / {name}" for name in list(found)[1:]))
    table.title = f"medians of {len(here)} runs each, and their 95 % intervals"
    common = set.intersection(*(set(run) for runs in found.values() for run in runs))  # commits differ in sizes
    for what in filter(common.__contains__, here[0]):
        columns = [[run[what] for run in runs] for runs in (here, *others)]
        ratios = (cell(estimate(columns[0], over)) for over in columns[1:])
        table.add_row(what, *(cell(estimate(column)) for column in columns), *ratios)
    return table


if __name__ == "__main__":
    sys.exit(main())
