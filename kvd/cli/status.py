"""`kvd status`: one look at a daemon, and how that looks in a terminal."""

import argparse
import json
import sys
from collections.abc import Iterable
from typing import Any

import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvd.cli.arguments import seconds
from kvd.daemon.config import load
from kvd.net.inquiry import Inquiry
from kvd.protocol.status import PeerStatus, StatusReport, decode
from kvd.transport.path import Kind, kind_of
from kvd.units import printable, size


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


def shown(text: str) -> str:
    """For a terminal: peers, other processes, and whoever listens at a socket may have chosen it."""
    return escape(printable(text))


def status_view(status: StatusReport) -> RenderableType:
    """The whole status, most important first."""
    return Group(headline(status), "", *tables(status))


def headline(status: StatusReport) -> Text:
    """Which daemon it is, and whether it takes work."""
    text = Text.assemble(
        (printable(status.daemon), "bold"),
        printable(f"  kvd {status.version}  pid {status.pid}  {status.device}  "),
        ("ready", "bold green") if status.ready else ("not ready", "bold red"),
        "\n",
        printable(f"peers at {status.address}   metrics at http://{status.http}/metrics"),
    )
    for name, reason in sorted(status.not_ready.items()):
        text.append(f"\n{printable(name)}: {printable(reason)}", style="red")
    return text


def tables(status: StatusReport) -> Iterable[RenderableType]:
    """Pools, peers, and the counts of leases and transfers."""
    yield _pools(status)
    yield _peers(status.handshake)
    yield _counts(status)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in ("size", "busy blocks", "unacknowledged") else "left")
    return table


def _pools(status: StatusReport) -> Table:
    table = _table("pools", "worker", "size", "memory", "state", "busy blocks", "unacknowledged")
    for pool in status.pools:
        log = status.completion.get(pool.worker)
        busy = status.scheduler.busy_blocks.get(pool.worker, 0)
        kept = log.kept if log else 0
        memory = f"{pool.backing or '-'} {pool.device[:12]}".rstrip()  # the first eight digits of the UUID
        table.add_row(shown(pool.worker), size(pool.bytes), shown(memory), shown(pool.state), str(busy), str(kept))
    return table


def _peers(peers: list[PeerStatus]) -> Table:
    table = _table("peers", "daemon", "address", "state", "path", "lanes", "heard")
    for peer in peers:
        kind = kind_of(peer.path)
        style = "red" if peer.slow else "dim" if kind is Kind.UNKNOWN else "green"
        state = peer.state if peer.state in ("ready", "refreshing") else f"[yellow]{shown(peer.state)}[/]"
        path = f"[{style}]{kind.value}{' (slow)' if peer.slow else ''}[/]"
        heard = f"{peer.silent_seconds:.1f} s ago"
        table.add_row(shown(peer.daemon or "?"), shown(peer.address), state, path, shown(peer.path or "-"), heard)
        if peer.unreached_seconds is not None:
            text = f"its memory has not been reached for {peer.unreached_seconds:.0f} s: {peer.last_loss}"
            table.add_row("", "", "", f"[red]{shown(text)}[/]")
        elif note := peer.slow or (peer.last_loss if peer.state not in ("ready", "refreshing") else ""):
            table.add_row("", "", "", f"[red]{shown(note)}[/]")
    return table


def _counts(status: StatusReport) -> Table:
    table = Table.grid(padding=(0, 2))
    leases, pulls = status.leases, status.scheduler
    table.add_row(
        "[bold]leases[/]",
        f"{leases.active} active, {leases.claimed} claimed, {leases.claims_held} claims held, "
        f"{leases.claims_waiting} claims waiting",
    )
    states = ", ".join(f"{count} {state}" for state, count in pulls.transfers.items()) or "no transfers"
    quarantined = f"[red]{pulls.quarantined} quarantined[/]" if pulls.quarantined else "0 quarantined"
    table.add_row("[bold]pulls[/]", f"{pulls.pulls} open ({shown(states)}), {quarantined}")
    held = ", ".join(f"{count} {state}" for state, count in (leases.blocks | pulls.blocks).items() if count)
    table.add_row("[bold]blocks[/]", shown(held or "none held"))
    totals = status.totals
    processor = status.processor
    if processor.waited:
        style = "red" if processor.starved else "default"
        table.add_row("[bold]processor[/]", f"[{style}]{shown(processor.text)}[/]")
    ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(totals.pulls.items())) or "none"
    table.add_row(
        "[bold]so far[/]", f"{shown(ended)}; {size(totals.read_bytes)} in {totals.read_descriptors} descriptors"
    )
    return table
