"""`python -m benchmarks.router`: what the router adds to the first token, beside a client that asks both servers."""

import argparse
import asyncio
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks import command
from benchmarks.router.relay import KINDS
from benchmarks.router.upstream import BODY, PATH, PREFILL
from kvd.bench import report
from kvd.bench.spinners import Spinners
from kvd.errors import ErrorCode, Unavailable
from kvd.processes import START_SECONDS, Child, Processes

_WARM_UP: Final = 50
"""Requests of each way that are not measured."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds to the first token of every request, by way; both take turns, so that the same machine serves both."""

    direct: list[float] = field(default_factory=list)
    """The client asks the prefill server, then the decode server."""
    routed: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, dict[str, float]]:
        """Medians and 99th percentiles, in milliseconds, and their differences."""
        ways = {way: _quantiles(times) for way, times in asdict(self).items()}
        added = {name: ways["routed"][name] - ways["direct"][name] for name in ways["direct"]}
        return {**ways, "added": added}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = command.make_parser("router", "Measures what the router adds to a request's first token.")
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second through the router (default: 50)")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long (default: 30)")
    parser.add_argument("--relay", choices=KINDS, help="put a process that decides nothing in its place")
    parser.add_argument("--busy", type=int, default=2, metavar="N", help="beside N spinning processes (default: 2)")
    return command.run(parser, _measure, arguments)


def _measure(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name, Spinners(args.busy, Path(name)), Processes(Path(name)) as processes:
        logs = Path(name)
        prefill, decode = (
            _started(processes, logs, role, "benchmarks.router.upstream") for role in ("prefill", "decode")
        )
        if args.relay:
            router = _started(processes, logs, "relay", "benchmarks.router.relay", args.relay, prefill, decode)
        else:
            flags = ["router", "--listen", "127.0.0.1:0", "--prefill", prefill, "--decode", decode]
            router = _started(processes, logs, "router", "kvd.cli.main", *flags)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            measured = runner.run(measure(router, prefill, decode, args.rate, args.seconds))
    figures = measured.as_dict()
    Console(width=report.WIDTH).print(_table(figures, len(measured.routed), args))
    report.write_json(args.json, {"rate": args.rate, "busy": args.busy, "relay": args.relay, "milliseconds": figures})


async def measure(router: str, prefill: str, decode: str, rate: float, seconds: float) -> Measured:
    """Sends `rate` requests a second each way; a request that is late delays no other."""
    measured = Measured()
    clock = asyncio.get_running_loop().time
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        start = clock()
        for number in range(_WARM_UP + int(rate * seconds)):
            await asyncio.sleep(start + number / rate - clock())
            kept = number >= _WARM_UP
            group.create_task(_first_token(session, [router], measured.routed if kept else []))
            await asyncio.sleep(start + (number + 0.5) / rate - clock())
            group.create_task(_first_token(session, [prefill, decode], measured.direct if kept else []))
    return measured


async def _first_token(session: aiohttp.ClientSession, servers: list[str], times: list[float]) -> None:
    start = time.perf_counter()
    body = BODY
    if len(servers) > 1:
        async with session.post(servers[0] + PATH, json=body | PREFILL) as response:
            body = body | {"kv_transfer_params": (await response.json())["kv_transfer_params"]}
    async with session.post(servers[-1] + PATH, json=body) as response:
        first = await response.content.readany()
        times.append(time.perf_counter() - start)
        rest = await response.read()
    if response.status != 200 or not (first + rest).endswith(b"[DONE]\n\n"):
        raise Unavailable(ErrorCode.PEER_LOST, f"{servers[-1]} answered with status {response.status}: {first[:200]!r}")


def _started(processes: Processes, logs: Path, name: str, module: str, *flags: str) -> str:
    """The URL that a process logs once it serves."""
    child: Child = processes.start(name, module, *flags)
    urls: list[str] = []

    def serves() -> bool:
        urls[:] = re.findall(r"on (http://[\d.:]+)", (logs / f"{name}.log").read_text())
        return bool(urls)

    if not child.wait_until(serves):
        raise Unavailable(ErrorCode.DEADLINE, f"{name} did not start within {START_SECONDS:.0f} s")
    return urls[0]


def _quantiles(times: list[float]) -> dict[str, float]:
    hundredths = statistics.quantiles(times, n=100, method="inclusive")
    return {"p50": hundredths[49] * 1e3, "p99": hundredths[98] * 1e3}


def _table(figures: dict[str, dict[str, float]], requests: int, args: argparse.Namespace) -> Table:
    table = Table("time to first token, ms", "p50", "p99")
    table.title = f"{requests} requests each way, {args.rate:g} a second"
    table.caption = f"beside {args.busy} spinning processes"
    if args.relay:
        table.caption += f"; routed by a process that only passes {args.relay} on"
    for way, times in figures.items():
        table.add_row(way, *(f"{times[name]:.2f}" for name in ("p50", "p99")))
    return table


if __name__ == "__main__":
    sys.exit(main())
