"""`kvd bench`: what kvd does beside what the machine can do, in one run."""

import argparse
import contextlib
import shlex
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress

from benchmarks import plan as bench_plan
from benchmarks.hosts import wire
from benchmarks.scale import __main__ as bench_scale
from benchmarks.vllm import __main__ as bench_vllm
from kvd.bench import load, report, transfers
from kvd.bench.pair import Pair
from kvd.bench.prepare import Preparation
from kvd.bench.spinners import Spinners
from kvd.errors import BadRequest, ErrorCode

_WINDOW = 32
"""Small pulls open at a time: as many requests as a busy decode engine has waiting for their KV."""


def add_parser(subparsers: Any) -> None:
    """Adds the command and its flags."""
    parser = subparsers.add_parser(
        "bench",
        help="measure pulls against memcpy and raw NIXL in one run",
        description="Measures pulls between two daemons of this machine, beside memcpy and raw NIXL.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--load", action="store_true", help="status and small pulls while a pull of 1 GiB runs")
    what.add_argument("--rate", action="store_true", help="how many small pulls a second are sustained")
    what.add_argument("--plan", action="store_true", help="how fast transfers are planned")
    what.add_argument("--layouts", action="store_true", help="scattered blocks of 80 layers, cross-layer and per layer")
    what.add_argument("--scale", action="store_true", help="one daemon with 1,000 peers and 10,000 leases, played")
    what.add_argument("--hosts", action="store_true", help="TCP between two network namespaces, beside iperf3 (root)")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long --rate runs (default: 30)")
    parser.add_argument("--rounds", type=int, default=10, help="how many pulls of 1 GiB --load makes (default: 10)")
    parser.add_argument(
        "--busy", type=int, default=0, metavar="N", help="processes that spin beside what the daemons do (default: 0)"
    )
    parser.add_argument(
        "--within", default="", metavar="COMMAND", help="starts the daemons, to place them: 'taskset --cpu-list 1'"
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE as well")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the throughputs into FILE (PNG)")
    parser.set_defaults(run=run)
    bench_vllm.add_parser(parser.add_subparsers(title="with an engine", metavar="engine"))


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table, writes the files."""
    if args.plan:
        figures = _plan()
    elif args.scale:
        figures = _scale(args)
    elif args.hosts:
        figures = _hosts(args)
    else:
        figures = _between_daemons(args)
    if args.json:
        document = {"machine": report.machine(), "busy": args.busy, "within": args.within, **figures}
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    return 0


def _plan() -> dict[str, object]:
    timings = bench_plan.bench_plan(Preparation())
    bench_plan.print_timings(timings)
    return {"plan": [timing.as_dict() for timing in timings]}


def _scale(args: argparse.Namespace) -> dict[str, object]:
    with _progress("turns", bench_scale.steps()) as advance:
        growth = bench_scale.grow(quick=args.quick, progress=advance)
    Console(width=report.WIDTH).print(bench_scale.table(growth))
    figures = growth.as_dict()
    Console().print(
        f"p99 with the most over p99 with the fewest: status {figures['status_p99_ratio']:.2f}, "
        f"pull {figures['pull_p99_ratio']:.2f}"
    )
    return {"scale": figures}


def _hosts(args: argparse.Namespace) -> dict[str, object]:
    missing = wire.why_not()
    if missing:
        raise BadRequest(ErrorCode.BAD_CONFIG, missing)
    turns = 1 if args.quick else 3
    with _progress("turns", turns) as advance:
        result = wire.measure(turns, 20, advance)
    Console().print(report.wire_table(result))
    return {"hosts": result.as_dict()}


def _between_daemons(args: argparse.Namespace) -> dict[str, object]:
    if args.busy < 0:
        raise BadRequest(ErrorCode.BAD_CONFIG, f"--busy {args.busy}: must be 0 or more")
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder,
        Pair(Path(folder), daemons_within=shlex.split(args.within)) as pair,
        Spinners(args.busy, Path(folder)),
    ):
        if args.load:
            return _load(pair, args)
        if args.rate:
            return _rate(pair, args)
        if args.layouts:
            return _layouts(pair, args)
        return _transfers(pair, args)


def _layouts(pair: Pair, args: argparse.Namespace) -> dict[str, object]:
    chosen = transfers.layout_cases(quick=args.quick)
    with _progress("layouts", len(chosen)) as advance:
        per_layer, cross_layer = transfers.measure(pair, chosen, advance)
    speedup = {"kvd": per_layer.kvd / cross_layer.kvd, "raw": per_layer.raw / cross_layer.raw}
    Console().print(report.transfers_table([per_layer, cross_layer], args.busy))
    Console().print(
        f"cross-layer blocks move {speedup['raw']:.1f} times as fast as per-layer blocks over raw NIXL, "
        f"{speedup['kvd']:.1f} times as fast through kvd"
    )
    return {"per_layer": per_layer.as_dict(), "cross_layer": cross_layer.as_dict(), "speedup": speedup}


def _transfers(pair: Pair, args: argparse.Namespace) -> dict[str, object]:
    chosen = transfers.cases(quick=args.quick)
    with _progress("transfers", len(chosen)) as advance:
        results = list(transfers.measure(pair, chosen, advance))
    Console(width=report.WIDTH).print(report.transfers_table(results, args.busy))
    if args.plot:
        report.plot(results, args.plot)
    return {"transfers": [result.as_dict() for result in results]}


def _load(pair: Pair, args: argparse.Namespace) -> dict[str, object]:
    with _progress("pulls of 1 GiB", args.rounds) as advance:
        result = load.interference(pair, args.rounds, advance)
    Console().print(report.interference_table(result, args.busy))
    return {"load": asdict(result)}


def _rate(pair: Pair, args: argparse.Namespace) -> dict[str, object]:
    with _progress("small pulls", None) as advance:
        result = load.sustained(pair, args.seconds, _WINDOW, advance)
    Console().print(report.rate_table(result, args.busy))
    return {"rate": asdict(result)}


@contextlib.contextmanager
def _progress(what: str, total: int | None) -> Iterator[Callable[[], None]]:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
