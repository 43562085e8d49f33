"""`python -m benchmarks.hosts`: TCP between two network namespaces, beside iperf3 or another checkout. Takes root."""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import command
from benchmarks.hosts import namespaces, versions, wire
from benchmarks.hosts.wire import BLOCK, BLOCKS, Wire
from kvd.bench import report
from kvd.errors import BadRequest, ErrorCode
from kvd.limits import MIB

_ROUNDS = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = command.make_parser("hosts", "Measures TCP between two network namespaces, beside iperf3. Takes root.")
    parser.add_argument("--quick", action="store_true", help="take one turn instead of three")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="instead compare pulls with another checkout")
    return command.run(parser, _measure, arguments)


def _measure(args: argparse.Namespace) -> None:
    if args.against is not None:
        _compare(args)
        return
    if missing := wire.why_not():
        raise BadRequest(ErrorCode.BAD_CONFIG, missing)
    turns = 1 if args.quick else 3
    with report.progress("turns", turns) as advance:
        found = wire.measure(turns, _ROUNDS, advance)
    Console().print(_table(found))
    report.write_json(args.json, found.as_dict())


def _compare(args: argparse.Namespace) -> None:
    if missing := namespaces.why_not():
        raise BadRequest(ErrorCode.BAD_CONFIG, missing)
    rounds = 2 if args.quick else 9
    with report.progress("rounds", rounds) as advance:
        found = versions.compare(args.against, rounds, advance)
    table = Table("pull", "other, ms", "this, ms", "this / other", title=f"medians of {rounds} rounds, by turns")
    for each in found:
        milliseconds = [f"{1e3 * statistics.median(seconds):.2f}" for seconds in (each.other, each.this)]
        table.add_row(each.case, *milliseconds, f"{each.ratio:.3f}")
    Console().print(table)
    report.write_json(args.json, {"cases": [each.as_dict() for each in found]})


def _table(found: Wire) -> Table:
    title = f"{BLOCKS * BLOCK // MIB} MiB over TCP between two network namespaces, medians of {len(found.turns)} turns"
    table = Table("what", "GB/s", "of one stream", title=title)
    for what in found.turns[0]:
        table.add_row(what, f"{found.rate(what):.2f}", f"{found.ratio(what):.2f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
