"""`python -m benchmarks.vllm`: a real vLLM with kvd, beside the same vLLM with its own NixlConnector."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import command
from benchmarks.vllm import report as vllm_report
from benchmarks.vllm import run as vllm
from benchmarks.vllm.groups import GROUPS
from benchmarks.vllm.servers import PLACEMENTS, model_folder
from kvd.bench import report
from kvd.cli.arguments import picture
from kvd.errors import BadRequest, ErrorCode
from tests.vllm.testbed.catalog import BLOCK
from tests.vllm.testbed.servers import LONGEST


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = command.make_parser(
        "vllm",
        "Starts pairs of a prefill and a decode server: with kvd, with vLLM's NixlConnector, and with "
        "NixlConnector's num_threads 0. All have the same model (16 layers, 8 KV heads of 128, 131,072 bytes per "
        "token), prompts, and one computing thread. They are measured in turns, pinned to a core each and unpinned.",
    )
    parser.add_argument("--prompt-tokens", type=int, default=600, help="tokens of a prompt (default: 600)")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of two turns per pair (default: 8)")
    parser.add_argument(
        "--concurrent",
        type=int,
        nargs="+",
        default=[1, 6, 16],
        help="numbers of concurrent requests to measure throughput with (default: 1 6 16)",
    )
    parser.add_argument(
        "--seconds", type=float, default=1200, help="stop after this long and report what there is (default: 1200)"
    )
    parser.add_argument(
        "--groups",
        nargs="+",
        default=["session"],
        choices=GROUPS,
        help="a pair with kvd for each: daemons and engines have a session each, a control group each (takes root), or "
        "a daemon shares one with its engine (default: session)",
    )
    parser.add_argument(
        "--placements",
        nargs="+",
        default=list(PLACEMENTS),
        choices=PLACEMENTS,
        help="each server on a core of its own, or all on all (default: both)",
    )
    parser.add_argument(
        "--arrivals",
        type=int,
        default=6,
        help="requests of a turn whose blocks arrive while another decodes (default: 6)",
    )
    parser.add_argument(
        "--kills", action="store_true", help="kill kvd's decode daemon in each turn, and time until it serves again"
    )
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw the figures side by side into FILE (PNG)")
    return command.run(parser, _run, arguments)


def _run(args: argparse.Namespace) -> None:
    longest = LONGEST - vllm.ANSWER_TOKENS
    if not 1 < args.prompt_tokens <= longest:
        raise BadRequest(ErrorCode.BAD_CONFIG, f"--prompt-tokens {args.prompt_tokens}: must be 2 to {longest}")
    if min(args.rounds, args.arrivals, *args.concurrent) < 1:
        raise BadRequest(ErrorCode.BAD_CONFIG, "--rounds, --arrivals and --concurrent: must be 1 or more")
    most = vllm.BLOCKS // -(-args.prompt_tokens // BLOCK)
    if args.arrivals > most:
        text = f"--arrivals {args.arrivals}: at most {most} prompts of {args.prompt_tokens} tokens wait at once"
        raise BadRequest(ErrorCode.BAD_CONFIG, text)
    plan = vllm.Plan(
        args.prompt_tokens,
        args.rounds,
        tuple(args.concurrent),
        args.seconds,
        tuple(dict.fromkeys(args.groups)),
        tuple(dict.fromkeys(args.placements)),
        args.arrivals,
        args.kills,
    )
    sides: list[vllm.Side] = []
    with model_folder("vllm") as folder:
        try:
            _measure(plan, folder, sides)
        finally:
            if any(side.rounds for side in sides):
                _report(args, plan, sides)


def _report(args: argparse.Namespace, plan: vllm.Plan, sides: list[vllm.Side]) -> None:
    for table in vllm_report.tables(sides):
        Console(width=vllm_report.WIDTH).print(table)
    report.write_json(args.json, {"plan": plan, "sides": sides})
    if args.plot:
        vllm_report.plot(sides, args.plot)


def _measure(plan: vllm.Plan, folder: Path, sides: list[vllm.Side]) -> None:
    steps = plan.pairs * (1 + len(plan.placements) * plan.rounds)
    with report.progress(f"{plan.pairs} pairs of servers start, then take turns", steps) as advance:
        asyncio.run(vllm.measure(folder, folder, plan, sides, advance))


if __name__ == "__main__":
    sys.exit(main())
