"""What the commands of this folder share: a parser with `--json`, and errors in one line."""

import argparse
import sys
from collections.abc import Callable, Sequence

from kvd.cli.arguments import output_file
from kvd.errors import KvdError


def make_parser(name: str, description: str) -> argparse.ArgumentParser:
    """The parser of `python -m benchmarks.NAME`."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the figures to FILE")
    return parser


def run(
    parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], None], arguments: Sequence[str] | None
) -> int:
    """Parses `arguments` (None: the command line), measures, and returns the exit status."""
    args = parser.parse_args(arguments)
    try:
        measure(args)
    except KvdError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0
