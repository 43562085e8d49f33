"""`kvd top`: a daemon, live in the terminal."""

import argparse
import contextlib
import itertools
import json
import math
import time
from collections import deque
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvd.cli.arguments import at_least, seconds
from kvd.cli.status import add_daemon_flags, headline, shown, socket_of, tables
from kvd.net.inquiry import Inquiry
from kvd.protocol.status import StatusReport, Totals, decode
from kvd.units import size

_BARS = " ▁▂▃▄▅▆▇█"
_HISTORY = 60
_LEAST_SECONDS = 1e-6
"""Between two statuses: no daemon answers faster, and rates over less may be infinite."""


def add_parser(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser("top", description="Shows a daemon live.")
    add_daemon_flags(parser)
    parser.add_argument("--interval", type=seconds, default=1.0, metavar="SECONDS", help="between updates (default: 1)")
    parser.add_argument("--count", type=at_least(0), default=0, metavar="N", help="end after N updates")
    parser.add_argument("--json", action="store_true", help="print a line of rates for each update instead")
    parser.set_defaults(run=run)


class Rates:
    """Rates between the last two statuses, and their history."""

    def __init__(self) -> None:
        self._last: Totals | None = None
        self.bytes_per_second = 0.0
        self.pulls_per_second: dict[str, float] = {}
        self.p50 = self.p99 = 0.0
        self.history: deque[float] = deque(maxlen=_HISTORY)

    def add(self, totals: Totals) -> None:
        """Takes another status in."""
        last = self._last
        self._last = totals
        seconds = totals.seconds - last.seconds if last else 0.0
        if last is None or seconds < _LEAST_SECONDS:  # the first one, or a daemon that was restarted
            return
        self.bytes_per_second = max(0, totals.read_bytes - last.read_bytes) / seconds
        self.pulls_per_second = {
            outcome: max(0, count - last.pulls.get(outcome, 0)) / seconds for outcome, count in totals.pulls.items()
        }
        buckets = [
            (float(bound), count - last.pull_buckets.get(bound, 0)) for bound, count in totals.pull_buckets.items()
        ]
        self.p50, self.p99 = quantile(buckets, 0.5), quantile(buckets, 0.99)
        self.history.append(self.bytes_per_second)

    def as_json(self, status: StatusReport) -> str:
        """One line for programs; a quantile without samples is null."""
        return json.dumps(
            {
                "daemon": status.daemon,
                "ready": status.ready,
                "bytes_per_second": round(self.bytes_per_second),
                "pulls_per_second": {outcome: round(rate, 3) for outcome, rate in self.pulls_per_second.items()},
                "pull_seconds_p50": self.p50 or None,
                "pull_seconds_p99": self.p99 or None,
                "pulls": status.scheduler.pulls,
                "leases": status.leases.active,
                "quarantined": status.scheduler.quarantined,
            }
        )


def quantile(buckets: list[tuple[float, int]], share: float) -> float:
    """The bucket bound below which `share` of the counts lie; `buckets` are (bound, cumulative count)."""
    buckets = sorted(buckets)
    if not buckets or buckets[-1][1] <= 0:  # counts fall where a daemon was restarted
        return 0.0
    wanted = share * buckets[-1][1]
    found = next(bound for bound, count in buckets if count >= wanted)
    return buckets[-2][0] if math.isinf(found) and len(buckets) > 1 else found


def run(args: argparse.Namespace) -> int:
    """Updates until Ctrl-C, or `--count` times."""
    rates = Rates()
    live = None if args.json else Live(console=Console(highlight=False), screen=not args.count, auto_refresh=False)
    path = socket_of(args)
    with contextlib.suppress(KeyboardInterrupt), live or contextlib.nullcontext():
        for update in range(1, args.count + 1) if args.count else itertools.count(1):
            with Inquiry(path) as inquiry:  # each time: the daemon may have been started again since
                status = decode(inquiry.status(args.timeout))
            rates.add(status.totals)
            if live:
                live.update(view(status, rates), refresh=True)
            else:
                print(rates.as_json(status), flush=True)
            time.sleep(args.interval if update != args.count else 0)
    return 0


def view(status: StatusReport, rates: Rates) -> RenderableType:
    """The screen."""
    now = Table.grid(padding=(0, 3))
    ended = sorted(rates.pulls_per_second.items())
    pulls = "   ".join(f"{outcome} {rate:.0f}/s" for outcome, rate in ended) or "-"
    now.add_row("[bold]bytes in[/]", f"{size(rates.bytes_per_second)}/s")
    now.add_row("[bold]pulls[/]", shown(pulls))
    durations = f"p50 within {rates.p50 * 1e3:g} ms, p99 within {rates.p99 * 1e3:g} ms" if rates.p50 else "-"
    now.add_row("[bold]duration[/]", durations)
    graph = Text(sparkline(rates.history), style="cyan")
    peak = f"peak {size(max(rates.history, default=0))}/s over the last {len(rates.history)} updates"
    panel = Panel(Group(now, "", graph, Text(peak, style="dim")), box=box.ROUNDED, title="now", title_align="left")
    return Group(headline(status), panel, *tables(status))


def sparkline(values: deque[float]) -> str:
    """One character for each value, of a height in proportion to the largest."""
    top = max(values, default=0)
    return "".join(_BARS[math.ceil(value / top * (len(_BARS) - 1))] if top else _BARS[0] for value in values)
