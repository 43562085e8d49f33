"""`kvd status`: one look at a daemon."""

import argparse
import sys
from typing import Any

from rich.console import Console

from kvd.cli.status_view import status_view
from kvd.daemon.config import load
from kvd.net.inquiry import Inquiry
from kvd.protocol.status import decode


def add_parser(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "status",
        help="one look at a daemon: pools, peers, leases, transfers, paths",
        description="Exits with 0 where the daemon is ready, 1 where it is not, 2 where there is none.",
    )
    add_daemon_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the report as the daemon sent it")
    parser.set_defaults(run=run)


def add_daemon_flags(parser: argparse.ArgumentParser) -> None:
    """Which daemon, and how long to wait for it."""
    parser.add_argument("--socket", metavar="PATH", help="its session socket (default: as for `kvd serve`)")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="for an answer (default: 5)")


def socket_of(args: argparse.Namespace) -> str:
    """The socket that was named, or the one that a daemon of this environment would have."""
    return str(args.socket or load({}).socket)


def run(args: argparse.Namespace) -> int:
    """Prints the status."""
    with Inquiry(socket_of(args)) as inquiry:
        report = inquiry.status(args.timeout)
    status = decode(report)
    if args.json:
        sys.stdout.write(report.decode() + "\n")
    else:
        Console(highlight=False).print(status_view(status))
    return 0 if status.ready else 1
