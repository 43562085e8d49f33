"""`kvd`: each subcommand is a module of its name, imported only when it is called."""

import argparse
import importlib
import os
import signal
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


_LAST_STANDARD = 2
_BY_SIGNAL = 128
"""Added to a signal's number, the exit status of who ends because of it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (without the program's name) and returns the exit status."""
    _have_standard_streams()
    arguments = sys.argv[1:] if argv is None else list(argv)
    command = arguments[0] if arguments else ""
    try:
        try:
            return _run(arguments, command)
        finally:
            sys.stdout.flush()  # where its errors can still be told
    except KvdError as error:
        print(f"kvd {command}: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        own = command if command in {"demo", "router"} else "daemon"
        extra = "plot" if error.name == "matplotlib" else own
        fix = f"pip install '.[{extra}]' in a clone of kvd"
        print(f"kvd {command}: {error.name} is not installed: {fix}", file=sys.stderr)
    except KeyboardInterrupt:
        return _BY_SIGNAL + signal.SIGINT
    except BrokenPipeError:  # whoever read the output has left, as `head` does
        _discard_output()
        return _BY_SIGNAL + signal.SIGPIPE
    except OSError as error:
        try:
            print(flush=True)
        except OSError:  # again, so it was this
            _discard_output()
            print(f"kvd {command}: cannot write to standard output: {error.strerror}", file=sys.stderr)
        else:
            raise
    return 2


def _run(arguments: list[str], command: str) -> int:
    parser = argparse.ArgumentParser(prog="kvd", description=kvd.__doc__)
    parser.add_argument("--version", action="version", version=f"kvd {kvd.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, text in COMMANDS.items():
        if command == name:
            importlib.import_module(f"kvd.cli.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=text)
    chosen = parser.parse_args(arguments)
    status: int = chosen.run(chosen)
    return status


def _have_standard_streams() -> None:
    """Opens /dev/null for those that are closed: a pool or a socket would get the number, and what is printed there."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _LAST_STANDARD:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed when Python started
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the process ends


def _discard_output() -> None:
    """Has what is left of the output go nowhere; else Python would try again at its exit, and complain."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


if __name__ == "__main__":
    sys.exit(main())
