"""`kvd keys`: makes and shows the keys by which daemons know each other."""

import argparse
from pathlib import Path
from typing import Any

from kvd.net import keys

_GENERATE = """\
Makes a key pair. FILE, of mode 0600, stays on this host (`kvd serve --curve-key FILE`). Add the printed line to the
allow-list of every daemon that this one meets (`kvd serve --curve-peers LIST`, read again on SIGHUP)."""


def add_parser(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser("keys", description="Makes and shows the keys by which daemons know each other.")
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    generate = actions.add_parser("generate", help="make a key pair", description=_GENERATE)
    show = actions.add_parser("show", help="print a key file's line for allow-lists")
    for action in (generate, show):
        action.add_argument("file", type=Path, metavar="FILE", help="the key file")
        action.add_argument("--name", required=True, help="the daemon's name, as `kvd serve --name` gives it")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the line `<public key> <name>`, of a new key or of one that is there.

    Raises:
        BadRequest: `BAD_CONFIG`, the name cannot stand in an allow-list, or the file cannot be written or read.

    """
    keys.check_name(args.name)
    if args.action == "generate":
        keys.save(keys.generate(), args.file)
    print(keys.load(args.file).public.hex(), args.name)
    return 0
