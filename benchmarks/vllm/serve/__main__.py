"""`python -m benchmarks.vllm.serve`: `vllm bench serve` against kvd, NixlConnector, and one plain server."""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from benchmarks import command
from benchmarks.vllm.serve import report
from benchmarks.vllm.serve import run as serve
from benchmarks.vllm.servers import model_folder
from kvd.bench.report import progress, write_json
from kvd.cli.arguments import picture
from kvd.errors import BadRequest, ErrorCode


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = command.make_parser(
        "vllm.serve",
        "Measures serving under load, of one turn and of five, with short and long prompts, at several rates of "
        "requests: with kvd and with NixlConnector behind `kvd router`, and with one plain server on the same cores.",
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[0.5, 1, 2], help="requests a second (default: 0.5 1 2)"
    )
    parser.add_argument(
        "--window", type=float, default=10.0, help="seconds for which requests come, at each rate (default: 10)"
    )
    parser.add_argument("--systems", nargs="+", default=serve.SYSTEMS, choices=serve.SYSTEMS, help="default: all")
    parser.add_argument(
        "--seconds", type=float, default=570.0, help="stop after this long and report what there is (default: 570)"
    )
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw the figures into FILE (PNG)")
    return command.run(parser, _measure, arguments)


def _measure(args: argparse.Namespace) -> None:
    if min(*args.rates, args.window, args.seconds) <= 0:
        raise BadRequest(ErrorCode.BAD_CONFIG, "--rates, --window and --seconds: must be above 0")
    plan = serve.Plan(args.systems, args.rates, args.window, args.seconds)
    found: list[serve.Measured] = []
    with model_folder("serve") as folder, progress("systems start, and serve, in turn", plan.steps) as advance:
        try:
            asyncio.run(serve.measure(folder, plan, found, advance))
        finally:
            print("\n".join(report.table(found)))
            write_json(args.json, {"plan": plan, "measured": found})
            if args.plot and found:
                report.plot(found, args.plot)


if __name__ == "__main__":
    sys.exit(main())
