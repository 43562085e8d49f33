"""`kvd bench`: pulls through kvd beside what the machine can do, in one run."""

import argparse
import shlex
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from kvd.bench import load, report, transfers
from kvd.bench.pair import Pair
from kvd.bench.spinners import Spinners
from kvd.cli.arguments import at_least, output_file, picture, positive_seconds
from kvd.errors import ErrorCode, refusal
from kvd.processes import ProcessEndedError

_WINDOW = 32
"""Small pulls open at a time: about as many as a busy decode engine has waiting for their KV."""


def add_parser(subparsers: Any) -> None:
    """Adds the command and its flags."""
    parser = subparsers.add_parser(
        "bench",
        description="Measures pulls between two daemons on this machine, beside memcpy and raw NIXL.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--load", action="store_true", help="measure status and small pulls during pulls of 1 GiB")
    what.add_argument("--rate", action="store_true", help="measure how many small pulls a second are sustained")
    what.add_argument("--device", type=_gpu, metavar="cuda:N", help="measure pulls between pools on that GPU")
    parser.add_argument("--seconds", type=positive_seconds, default=30.0, help="how long --rate runs (default: 30)")
    parser.add_argument(
        "--rounds", type=at_least(1), default=10, help="how many pulls of 1 GiB --load makes (default: 10)"
    )
    parser.add_argument(
        "--busy", type=at_least(0), default=0, metavar="N", help="spin N processes during the measurement (default: 0)"
    )
    parser.add_argument(
        "--yield", action="store_true", dest="yielding", help="let those yield their core again and again, as vLLM does"
    )
    parser.add_argument(
        "--within",
        type=_command,
        default="",
        metavar="COMMAND",
        help="start the daemons through COMMAND, e.g. 'taskset --cpu-list 1' to pin them",
    )
    parser.add_argument("--quick", action="store_true", help="run a tenth of the rounds")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw the throughputs into FILE (PNG)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures, prints a table, writes the files."""
    if args.yielding and not args.busy:
        raise refusal(ErrorCode.BAD_CONFIG, "--yield is about the processes of --busy: say how many, --busy 2")
    if args.device is not None and (args.busy or args.within or args.plot):
        raise refusal(ErrorCode.BAD_CONFIG, "--device measures neither --busy nor --within, and draws no --plot")
    if args.plot is not None and (args.load or args.rate):
        raise refusal(ErrorCode.BAD_CONFIG, "--plot draws throughputs, which neither --load nor --rate measures")
    try:
        if args.device is not None:
            _on_gpu(args)
        else:
            _with_pair(args)
    except ProcessEndedError as error:
        sys.stderr.write(f"kvd bench: {ErrorCode.INTERNAL}: {error}\n")  # of many lines
        return 2
    return 0


def _with_pair(args: argparse.Namespace) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder,
        Pair(Path(folder), daemons_within=shlex.split(args.within)) as pair,
        Spinners(args.busy, Path(folder), yielding=args.yielding),
    ):
        measure = _load if args.load else _rate if args.rate else _transfers
        measure(pair, args)


def _write(args: argparse.Namespace, figures: dict[str, object]) -> None:
    report.write_json(args.json, {"busy": args.busy, "yield": args.yielding, "within": args.within, **figures})


def _command(text: str) -> str:
    """A command of a shell's words, of which the first can be run."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    if words and shutil.which(words[0]) is None:
        raise argparse.ArgumentTypeError(f"{text!r}: there is no command {words[0]!r}")
    return text


def _gpu(text: str) -> int:
    """The number of a GPU, of `cuda:N`."""
    kind, _, number = text.partition(":")
    if kind != "cuda" or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: must be cuda:N, N the number of a GPU")
    return int(number)


def _on_gpu(args: argparse.Namespace) -> None:
    from kvd.bench import gpu  # noqa: PLC0415 - CUDA is an extra

    with report.progress("sizes of blocks", len(gpu.SIZES)) as advance:
        measured = list(gpu.measure(args.device, quick=args.quick, progress=advance))
    memories = {"pools on the GPU": f"cuda:{args.device}", "in host memory": "cpu"}
    figures: dict[str, object] = {
        f"one block of 16 KiB, {where}, us": 1e6 * gpu.seconds_of_one_block(memory, quick=args.quick)
        for where, memory in memories.items()
    }
    figures["one copy of all, GB/s"] = measured[0].rate(measured[0].one_copy)
    rows = [report.gpu_row(row) for row in measured]
    console = Console(width=report.WIDTH)
    console.print(report.gpu_table(rows))
    for what, figure in figures.items():
        console.print(f"{what}: {figure:.3g}")
    _write(args, {"gpu": {**figures, "blocks": rows}})


def _transfers(pair: Pair, args: argparse.Namespace) -> None:
    cases = transfers.cases(quick=args.quick)
    with report.progress("transfers", len(cases)) as advance:
        results = list(transfers.measure(pair, cases, advance))
    Console(width=report.WIDTH).print(report.transfers_table(results, args.busy))
    _write(args, {"transfers": [result.as_dict() for result in results]})
    if args.plot:
        report.plot(results, args.plot)


def _load(pair: Pair, args: argparse.Namespace) -> None:
    with report.progress("pulls of 1 GiB", args.rounds) as advance:
        result = load.interference(pair, args.rounds, advance)
    Console().print(report.interference_table(result, args.busy))
    _write(args, {"load": asdict(result)})


def _rate(pair: Pair, args: argparse.Namespace) -> None:
    with report.progress("small pulls", None) as advance:
        result = load.sustained(pair, args.seconds, _WINDOW, advance)
    Console().print(report.rate_table(result, args.busy))
    _write(args, {"rate": asdict(result)})
