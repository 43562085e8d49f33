"""`kvd drain`: stops a daemon after its work is finished."""

import argparse
import os
import signal
import sys
import time
from typing import Any

from kvd.cli import arguments
from kvd.cli.status import add_daemon_flags, socket_of
from kvd.errors import ErrorCode, Unavailable, refusal
from kvd.net.inquiry import Inquiry
from kvd.net.unix import readable
from kvd.protocol.status import decode

_LOOK_SECONDS = 0.5


def add_parser(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "drain",
        description="Sends SIGTERM to the daemon behind the socket and waits until it is gone: it becomes unready, "
        "refuses new offers and pulls, finishes running ones within its grace time (KVD_DRAIN_GRACE), and exits.",
    )
    add_daemon_flags(parser)
    parser.add_argument(
        "--wait", type=arguments.seconds, default=120.0, metavar="SECONDS", help="time limit (default: 120)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Drains: 0 if the daemon is gone, 1 if it still runs after `--wait`."""
    started = time.monotonic()
    with Inquiry(socket_of(args)) as inquiry:
        process = inquiry.process()
        try:
            _terminate(process, inquiry)
            gone = _wait(process, inquiry, args)
        finally:
            os.close(process)
    seconds = time.monotonic() - started
    if args.json:
        sys.stdout.write(f'{{"drained": {str(gone).lower()}, "seconds": {seconds:.3f}}}\n')
    else:
        sys.stdout.write(f"drained in {seconds:.1f} s\n" if gone else f"still running after {seconds:.1f} s\n")
    return 0 if gone else 1


def _terminate(process: int, inquiry: Inquiry) -> None:
    try:
        with inquiry.unless_ended():
            signal.pidfd_send_signal(process, signal.SIGTERM)
    except PermissionError as error:
        text = (
            f"pid {inquiry.credentials.pid} belongs to user {inquiry.credentials.uid}; run this as that user or as root"
        )
        raise refusal(ErrorCode.NOT_PERMITTED, text) from error


def _wait(process: int, inquiry: Inquiry, args: argparse.Namespace) -> bool:
    """Whether the process ended in time; prints what it still waits for."""
    deadline = time.monotonic() + args.wait
    told = ""
    while (left := deadline - time.monotonic()) > 0:
        if readable(process, min(_LOOK_SECONDS, left)):
            return True
        try:
            status = decode(inquiry.status(min(args.timeout, deadline - time.monotonic())))
        except Unavailable:  # it hangs up on everybody shortly before its end
            continue
        text = f"draining: {status.scheduler.pulls} pulls, {status.leases.active} leases"
        if text != told and not args.json:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
            told = text
    return False
