"""`python -m benchmarks.hosts`: TCP between two network namespaces, beside iperf3. Takes root."""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks import command
from benchmarks.hosts import wire
from benchmarks.hosts.wire import BLOCK, BLOCKS, Wire
from kvd.bench import report
from kvd.errors import BadRequest, ErrorCode
from kvd.limits import MIB

_ROUNDS = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = command.make_parser("hosts", "Measures TCP between two network namespaces, beside iperf3. Takes root.")
    parser.add_argument("--quick", action="store_true", help="take one turn instead of three")
    return command.run(parser, _measure, arguments)


def _measure(args: argparse.Namespace) -> None:
    if missing := wire.why_not():
        raise BadRequest(ErrorCode.BAD_CONFIG, missing)
    turns = 1 if args.quick else 3
    with report.progress("turns", turns) as advance:
        found = wire.measure(turns, _ROUNDS, advance)
    Console().print(_table(found))
    report.write_json(args.json, found.as_dict())


def _table(found: Wire) -> Table:
    title = f"{BLOCKS * BLOCK // MIB} MiB over TCP between two network namespaces, medians of {len(found.turns)} turns"
    table = Table("what", "GB/s", "of one stream", title=title)
    for what in found.turns[0]:
        table.add_row(what, f"{found.rate(what):.2f}", f"{found.ratio(what):.2f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
