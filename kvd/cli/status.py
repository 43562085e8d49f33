"""`kvd status`: one look at a daemon."""

import argparse
import json
import sys
from typing import Any

import msgspec
from rich.console import Console

from kvd.cli.arguments import seconds
from kvd.cli.status_view import status_view
from kvd.daemon.config import load
from kvd.net.inquiry import Inquiry
from kvd.protocol.status import decode


def add_parser(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "status",
        description="Shows pools, peers, leases, transfers and paths. Exit status: 0 ready, 1 not ready, 2 no daemon.",
    )
    add_daemon_flags(parser)
    parser.add_argument("--json", action="store_true", help="print all that this release knows of it as JSON")
    parser.set_defaults(run=run)


def add_daemon_flags(parser: argparse.ArgumentParser, timeout: float = 5.0) -> None:
    """Adds the flags that say which daemon, and how long to wait for it."""
    parser.add_argument("--socket", metavar="PATH", help="the daemon's session socket (default: as for `kvd serve`)")
    parser.add_argument(
        "--timeout", type=seconds, default=timeout, metavar="SECONDS", help=f"time limit (default: {timeout:g})"
    )


def socket_of(args: argparse.Namespace) -> str:
    """The socket given, or the one of a daemon started in this environment."""
    return str(args.socket or load({}).socket)


def run(args: argparse.Namespace) -> int:
    """Prints the status."""
    with Inquiry(socket_of(args)) as inquiry:
        status = decode(inquiry.status(args.timeout))
    if args.json:
        # What was checked, and in ASCII: others have a say in it.
        sys.stdout.write(json.dumps(msgspec.to_builtins(status)) + "\n")
    else:
        Console(highlight=False).print(status_view(status))
    return 0 if status.ready else 1
