"""`kvd plan`: explain a transfer between two layouts without a daemon."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from kvd.errors import ErrorCode, refusal
from kvd.layout import CacheSpec, Shard
from kvd.layout.models import MODELS, even_stages, model_spec
from kvd.layout.presets import LAYOUTS
from kvd.limits import MAX_BLOCKS_PER_REQUEST, MAX_RANKS
from kvd.plan.explain import Figures, GroupFigures, explain
from kvd.units import size

_EPILOG = f"""layouts: {" ".join(LAYOUTS)}
models:  {" ".join(MODELS)}
A file holds JSON: the spec of the only rank, or a list of the specs of all ranks."""


_HEADINGS = ("group", "positions", "bytes", "as full", "descriptors", "largest", "smallest")


def add_parser(subparsers: Any) -> None:
    """Add `plan` to the subparsers of `kvd`."""
    parser = subparsers.add_parser(
        "plan",
        description="Shows what a consumer rank would read from a producer for a sequence of TOKENS tokens.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("producer", help="a layout or a file of the producer's specs")
    parser.add_argument("consumer", help="a layout or a file of the consumer's specs")
    parser.add_argument("tokens", type=int, help="length of the sequence, all of it computed by the producer")
    parser.add_argument(
        "--model",
        choices=MODELS,
        metavar="NAME",
        default="Llama-3-8B",
        help="the model whose cache is laid out",
    )
    for side in ("producer", "consumer"):
        parser.add_argument(f"--{side}-tp", type=int, default=1, metavar="N", help=f"tensor-parallel size, {side}")
        parser.add_argument(f"--{side}-pp", type=int, default=1, metavar="N", help=f"pipeline-parallel size, {side}")
        parser.add_argument(f"--{side}-cp", type=int, default=1, metavar="N", help=f"context-parallel size, {side}")
        parser.add_argument(
            f"--{side}-block", type=int, default=16, metavar="N", help=f"tokens of a block on a rank, {side}"
        )
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="the consumer rank to explain")
    ids_help = "whether no two blocks are neighbours on both sides, or all are (default: scattered)"
    parser.add_argument("--ids", choices=("scattered", "adjacent"), default="scattered", help=ids_help)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the table or the JSON.

    Raises:
        BadRequest: no plan can be made.

    """
    producer, consumer = _specs(args, "producer"), _specs(args, "consumer")
    _bounded("--rank", args.rank, 0, len(consumer) - 1)
    figures = explain(producer, consumer[args.rank], args.tokens, args.ids)
    if args.json:
        print(json.dumps(asdict(figures), indent=2))
    else:
        _print_table(figures, args.rank)
    return 0


def _specs(args: argparse.Namespace, side: str) -> list[CacheSpec]:
    """The specs of all ranks of one side: from a layout and the model, or from a file."""
    name = getattr(args, side)
    if name not in LAYOUTS:
        return _read(Path(name))
    model = MODELS[args.model]
    tp_size, pp_size = getattr(args, f"{side}_tp"), getattr(args, f"{side}_pp")
    block_tokens = getattr(args, f"{side}_block")
    _bounded(f"--{side}-block", block_tokens, 1, MAX_BLOCKS_PER_REQUEST)
    _bounded("tokens", args.tokens, 1, MAX_BLOCKS_PER_REQUEST)
    _bounded(f"--{side}-tp", tp_size, 1, MAX_RANKS)
    _bounded(f"--{side}-pp", pp_size, 1, model.layers)
    engine = Shard(stages=even_stages(model.layers, pp_size), tp_size=tp_size, cp_size=getattr(args, f"{side}_cp"))
    num_blocks = -(-args.tokens // block_tokens)
    return [
        model_spec(model, name, shard, num_blocks=num_blocks, block_tokens=block_tokens)
        for shard in engine.every_rank()
    ]


def _bounded(option: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise refusal(ErrorCode.BAD_CONFIG, f"{option} {value}: must be from {least} to {most}")


def _read(path: Path) -> list[CacheSpec]:
    """One spec, or a list of them: an engine's ranks in order."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        text = f"{path} is no layout, and cannot be read as a file of specs: {error.strerror}"
        raise refusal(ErrorCode.BAD_SPEC, text) from error
    if raw.lstrip().startswith(b"["):
        try:
            return [CacheSpec.decode_json(bytes(spec)) for spec in msgspec.json.decode(raw, type=list[msgspec.Raw])]
        except (msgspec.DecodeError, RecursionError) as error:
            raise refusal(ErrorCode.BAD_SPEC, f"{path}: {error}") from error
    return [CacheSpec.decode_json(raw)]


def _print_table(figures: Figures, rank: int) -> None:
    table = Table(title=f"{figures.tokens} tokens into consumer rank {rank}", box=None, padding=(0, 1, 0, 0))
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading == "group" else "right", no_wrap=True)
    for group in figures.groups:
        positions = f"{group.first_position}..{group.first_position + group.blocks}"
        table.add_row(f"{group.layers} x {group.window}", positions, *_sizes(group))
    table.add_row("together", "", *_sizes(figures))
    console = Console()
    console.print(table)
    share = figures.bytes / figures.bytes_as_full if figures.bytes_as_full else 1.0
    console.print(f"{1 - share:.1%} less than with full attention everywhere")
    console.print(f"reads source ranks {list(figures.sources)}; readers of every source rank: {list(figures.readers)}")


def _sizes(figures: Figures | GroupFigures) -> tuple[str, ...]:
    return (
        size(figures.bytes),
        size(figures.bytes_as_full),
        f"{figures.descriptors:,}",
        size(figures.largest),
        size(figures.smallest),
    )
