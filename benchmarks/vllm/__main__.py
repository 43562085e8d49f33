"""`kvd bench vllm`: a real vLLM with kvd, beside the same vLLM with its own NixlConnector."""

import argparse
import asyncio
import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress

from benchmarks.vllm import report as vllm_report
from benchmarks.vllm import run as vllm
from kvd.bench import report
from kvd.errors import BadRequest, ErrorCode, Unavailable
from kvd.processes import ProcessEndedError
from tests.vllm.testbed.catalog import write_models
from tests.vllm.testbed.http import HttpError
from tests.vllm.testbed.servers import LONGEST


def add_parser(subparsers: Any) -> None:
    """Adds the command and its flags."""
    parser = subparsers.add_parser(
        "vllm",
        help="real vLLM servers with kvd and with NixlConnector, in one run",
        description="Starts a prefill and a decode server with kvd, two with vLLM's NixlConnector, and two with its "
        "num_threads 0: the same model (16 layers, 8 KV heads of 128, 131,072 bytes a token) and prompts, one "
        "computing thread in each; and measures them in turns, pinned to a core each and unpinned.",
    )
    parser.add_argument("--prompt-tokens", type=int, default=600, help="tokens of a prompt (default: 600)")
    parser.add_argument("--rounds", type=int, default=8, help="how often each pair has its two turns (default: 8)")
    parser.add_argument(
        "--concurrent",
        type=int,
        nargs="+",
        default=[1, 6, 16],
        help="requests at once, for throughput (default: 1 6 16)",
    )
    parser.add_argument(
        "--seconds", type=float, default=1200, help="after which what was measured is all (default: 1200)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of every round to FILE as well")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them side by side into FILE (PNG)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures, prints the tables, writes the files, as far as it came.

    Raises:
        BadRequest: `BAD_CONFIG`, there is no vLLM here, or the prompts do not fit into its context.
        Unavailable: `CANCELLED`, a server failed; its logs are kept.

    """
    if importlib.util.find_spec("vllm") is None:
        raise BadRequest(ErrorCode.BAD_CONFIG, "vLLM is not installed here: make setup-vllm, then .venv-vllm/bin/kvd")
    longest = LONGEST - vllm.ANSWER_TOKENS
    if not 1 < args.prompt_tokens <= longest:
        raise BadRequest(ErrorCode.BAD_CONFIG, f"--prompt-tokens {args.prompt_tokens}: must be 2 to {longest}")
    if min(args.rounds, *args.concurrent) < 1:
        raise BadRequest(ErrorCode.BAD_CONFIG, "--rounds and --concurrent: must be 1 or more")
    plan = vllm.Plan(args.prompt_tokens, args.rounds, tuple(args.concurrent), args.seconds)
    folder = Path(tempfile.mkdtemp(prefix="kvd-vllm-"))
    sides: list[vllm.Side] = []
    try:
        _measure(plan, folder, sides)
    except (HttpError, ProcessEndedError, TimeoutError) as error:
        if any(side.rounds for side in sides):
            _report(args, plan, sides)
        why = f"{type(error).__name__} {error}".rstrip()
        raise Unavailable(
            ErrorCode.CANCELLED, f"ended before the last round: {why}; the logs of all servers are in {folder}"
        ) from error
    shutil.rmtree(folder)
    _report(args, plan, sides)
    return 0


def _report(args: argparse.Namespace, plan: vllm.Plan, sides: list[vllm.Side]) -> None:
    for table in vllm_report.tables(sides):
        Console(width=vllm_report.WIDTH).print(table)
    if args.json:
        document = {"machine": report.machine(), "plan": plan, "sides": sides}
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    if args.plot:
        vllm_report.plot(sides, args.plot)


def _measure(plan: vllm.Plan, folder: Path, sides: list[vllm.Side]) -> None:
    write_models(folder, vllm.MODEL)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("three pairs of servers start, then take turns", total=3 + 6 * plan.rounds)
        asyncio.run(vllm.measure(folder, folder, plan, sides, lambda: progress.advance(task)))
