"""`kvd`: each subcommand is a module of its name, imported only when it is called."""

import argparse
import importlib
import sys
from collections.abc import Sequence

import kvd
from kvd.errors import KvdError

COMMANDS = {
    "serve": "run the daemon",
    "router": "route requests between prefill and decode servers",
    "status": "show a daemon: pools, peers, leases, transfers, paths",
    "top": "watch a daemon live in the terminal",
    "doctor": "check this host for what kvd needs, and say how to fix it",
    "pools": "give the memory of a pool back whose worker is gone",
    "drain": "stop a daemon once its work is finished",
    "keys": "make and show the keys by which daemons know each other",
    "demo": "run prefill in one process and decode in another, with kvd between them",
    "bench": "measure pulls against memcpy and raw NIXL in one run",
    "plan": "explain a transfer: bytes and descriptors per group",
    "protos": "write or check the description of the protocol",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (without the program's name) and returns the exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="kvd", description=kvd.__doc__)
    parser.add_argument("--version", action="version", version=f"kvd {kvd.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    command = arguments[0] if arguments else ""
    try:
        for name, text in COMMANDS.items():
            if command == name:
                importlib.import_module(f"kvd.cli.{name}").add_parser(subparsers)
            else:
                subparsers.add_parser(name, help=text)
        chosen = parser.parse_args(arguments)
        status: int = chosen.run(chosen)
    except KvdError as error:
        print(f"kvd {command}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        extra = command if command in {"demo", "router"} else "daemon"
        fix = f"pip install '.[{extra}]' in a clone of kvd"
        print(f"kvd {command}: {error.name} is not installed: {fix}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
