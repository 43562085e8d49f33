"""`kvd pools`: ends pools whose workers are gone."""

import argparse
from typing import Any

from kvd.cli.status import add_daemon_flags, socket_of
from kvd.net.inquiry import Inquiry

_END = """\
Ends a pool that is kept for a worker that is gone, before KVD_POOL_LINGER is over, and gives its memory back. Returns
once nothing reads from it any more: offers that a peer reads end after KVD_ATTACH_WAIT at the latest. For the pool's
user, the daemon's and root."""


def add_parser(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser("pools", description="Ends pools whose workers are gone; `kvd status` lists them.")
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    end = actions.add_parser("end", help="give the memory of a kept pool back", description=_END)
    end.add_argument("name", metavar="NAME", help="the pool's name, as `kvd status` shows it")
    add_daemon_flags(end, timeout=60.0)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ends the pool."""
    with Inquiry(socket_of(args)) as inquiry:
        inquiry.end_pool(args.name, args.timeout)
    print(f"the pool {args.name!r} has ended")
    return 0
