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

from kvd.bench import report, vllm, vllm_report
from kvd.engines.vllm_lab.catalog import write_models
from kvd.engines.vllm_lab.http import HttpError
from kvd.engines.vllm_lab.servers import LONGEST
from kvd.errors import BadRequest, ErrorCode, Unavailable
from kvd.processes import ProcessEndedError


def add_parser(subparsers: Any) -> None:
    """Adds the command and its flags."""
    parser = subparsers.add_parser(
        "vllm",
        help="real vLLM servers with kvd and with NixlConnector, in one run",
        description="Starts a prefill and a decode server with kvd, two with vLLM's NixlConnector, and two with its "
        "num_threads 0: the same model (16 layers, 8 KV heads of 128, 131,072 bytes a token) and prompts, one "
        "computing thread in each; and measures them in turns.",
    )
    parser.add_argument("--prompt-tokens", type=int, default=1000, help="tokens of a prompt (default: 1000)")
    parser.add_argument("--rounds", type=int, default=10, help="how often each pair has its turn (default: 10)")
    parser.add_argument("--concurrent", type=int, default=6, help="requests at once, for throughput (default: 6)")
    parser.add_argument("--seconds", type=float, default=600, help="after which no round begins (default: 600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE as well")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them into FILE (PNG)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table, writes the files.

    Raises:
        BadRequest: `BAD_CONFIG`, there is no vLLM here, or the prompts do not fit into its context.
        Unavailable: `CANCELLED`, a server failed; its logs are kept.

    """
    if importlib.util.find_spec("vllm") is None:
        raise BadRequest(ErrorCode.BAD_CONFIG, "vLLM is not installed here: make setup-vllm, then .venv-vllm/bin/kvd")
    longest = LONGEST - vllm.ANSWER_TOKENS
    if not 1 < args.prompt_tokens <= longest:
        raise BadRequest(ErrorCode.BAD_CONFIG, f"--prompt-tokens {args.prompt_tokens}: must be 2 to {longest}")
    plan = vllm.Plan(args.prompt_tokens, args.rounds, args.concurrent, args.seconds)
    folder = Path(tempfile.mkdtemp(prefix="kvd-vllm-"))
    try:
        sides = _measure(plan, folder)
    except (HttpError, ProcessEndedError, TimeoutError) as error:
        raise Unavailable(ErrorCode.CANCELLED, f"{error}; the logs of all servers are in {folder}") from error
    shutil.rmtree(folder)
    summaries = [vllm_report.summary(side) for side in sides]
    Console().print(vllm_report.table(*summaries))
    if args.json:
        document = {"machine": report.machine(), "plan": plan, "summary": summaries, "sides": sides}
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    if args.plot:
        vllm_report.plot(sides, args.plot)
    return 0


def _measure(plan: vllm.Plan, folder: Path) -> list[vllm.Side]:
    write_models(folder, vllm.MODEL)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting six servers", total=1 + 3 * plan.rounds)

        def advance() -> None:
            progress.update(task, advance=1, description="rounds")

        return asyncio.run(vllm.measure(folder, folder, plan, advance))
