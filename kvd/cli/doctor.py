"""`kvd doctor`: checks this host for what kvd needs, each finding with its fix."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from kvd.cli.status import add_daemon_flags, shown, socket_of
from kvd.daemon.config import load
from kvd.doctor import Finding, Level
from kvd.doctor.daemon import check_daemon
from kvd.doctor.gpus import check_gpus
from kvd.doctor.host import check_huge_pages, check_memlock, check_rdma
from kvd.doctor.loopback import check_transfer
from kvd.doctor.samehost import check_copy

_TRANSFER_SECONDS = 60.0
_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.SLOW: "yellow", Level.BROKEN: "red"}


def add_parser(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "doctor",
        description="Checks this host for what kvd needs. Run it as the daemon's user, in its container. Exits with 1 "
        "if something is broken.",
    )
    add_daemon_flags(parser)
    parser.add_argument("--no-transfer", action="store_true", help="skip the transfer by NIXL")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Checks everything, then reports."""
    findings = list(_findings(args))
    if args.json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings], indent=2) + "\n")
    else:
        Console(highlight=False).print(_view(findings))
    return 1 if any(finding.level is Level.BROKEN for finding in findings) else 0


def _findings(args: argparse.Namespace) -> Iterator[Finding]:
    yield check_memlock()
    yield check_huge_pages()
    yield check_copy(_TRANSFER_SECONDS)
    yield from check_rdma()
    yield from check_gpus(load({}).device)
    yield from check_daemon(socket_of(args), args.timeout)
    if not args.no_transfer:
        yield from check_transfer(_TRANSFER_SECONDS)


def _view(findings: list[Finding]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        style = _STYLES[finding.level]
        table.add_row(f"[{style}]{finding.level.value}[/]", f"[bold]{shown(finding.subject)}[/]", shown(finding.text))
        if finding.fix:
            table.add_row("", "", f"[dim]fix: {shown(finding.fix)}[/]")
    return table
