"""`kvd demo`: a prefill and a decode engine in processes of their own, and kvd between them."""

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvd.cli.arguments import at_least, picture
from kvd.engines.demo import timeline
from kvd.engines.demo.chunks import traced
from kvd.engines.demo.messages import EngineConfig
from kvd.engines.demo.model import ModelConfig
from kvd.engines.demo.report import Report, Traffic, as_json, as_table, make_report
from kvd.engines.demo.router import Request, RequestFailedError, Router
from kvd.engines.demo.spec import engine_specs
from kvd.engines.demo.timeline import Timeline
from kvd.engines.demo.workload import SingleEngine, make_prompts, pool_tokens
from kvd.errors import BadRequest
from kvd.layout.presets import LAYOUTS
from kvd.processes import Child, ProcessEndedError, Processes

TOKENS_DIFFER = 1
COULD_NOT_RUN = 2
INTERRUPTED = 128 + signal.SIGINT


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command and its flags."""
    parser = subparsers.add_parser(
        "demo",
        description="Starts two daemons and two engines with a small real transformer, and shows what moved and that "
        "every token equals a single engine's.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("--requests", type=at_least(1), default=16, help="how many prompts (default: 16)")
    parser.add_argument(
        "--tokens",
        type=at_least(2),
        default=16,
        help="tokens per prompt, the first by the prefill engine",
    )
    parser.add_argument("--producer-tp", type=at_least(1), default=1, metavar="N", help="ranks of the prefill engine")
    parser.add_argument("--consumer-tp", type=at_least(1), default=1, metavar="N", help="ranks of the decode engine")
    parser.add_argument("--layout", choices=LAYOUTS, default="flash-hnd", help="KV layout of both (default: flash-hnd)")
    parser.add_argument("--producer-layout", choices=LAYOUTS, help="KV layout of the prefill engine")
    parser.add_argument("--consumer-layout", choices=LAYOUTS, help="KV layout of the decode engine")
    parser.add_argument("--block-size", type=at_least(1), default=16, metavar="N", help="tokens per block")
    parser.add_argument("--producer-block-size", type=at_least(1), metavar="N", help="of the prefill engine")
    parser.add_argument("--consumer-block-size", type=at_least(1), metavar="N", help="of the decode engine")
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="DEVICE",
        help="where the pools are: cpu, or cuda:N; engines compute on the CPU",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the prompts")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--plot",
        type=picture,
        metavar="FILE",
        help="draw when a long prompt's blocks were computed and read into FILE (PNG)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the demo: 0 if every token is right, 1 if one differs, 2 if the demo could not finish."""
    console = Console(stderr=True)
    try:
        with _terminated_like_interrupted(), tempfile.TemporaryDirectory(prefix="kvd-") as folder:
            report, lines = _demo(args, Path(folder), console)
    except (ProcessEndedError, RequestFailedError, BadRequest) as error:
        console.print(f"kvd demo: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return COULD_NOT_RUN
    except KeyboardInterrupt:
        return INTERRUPTED
    if args.json:
        sys.stdout.write(as_json(report, lines) + "\n")
    else:
        Console().print(as_table(report))
        Console(width=timeline.WIDTH).print(timeline.as_table(lines))
    if args.plot:
        timeline.plot(lines, args.plot)
    return 0 if report.total.tokens_equal else TOKENS_DIFFER


def _demo(args: argparse.Namespace, folder: Path, console: Console) -> tuple[Report, list[Timeline]]:
    model = ModelConfig(seed=args.seed)
    block_sizes = (args.producer_block_size or args.block_size, args.consumer_block_size or args.block_size)
    prompts = make_prompts(args.requests, max(block_sizes), model.vocab, args.seed)
    requests = [Request(f"request-{index}", prompt) for index, prompt in enumerate(prompts)]
    longest = max(len(prompt) for prompt in prompts)
    room = pool_tokens(longest, args.tokens, *block_sizes)
    configs = [
        EngineConfig(
            name=side,
            socket=str(folder / f"{side}.sock"),
            layout=layout or args.layout,
            tp_size=tp_size,
            block_tokens=block_tokens,
            num_blocks=room // block_tokens,
            seed=args.seed,
        )
        for side, layout, tp_size, block_tokens in (
            ("prefill", args.producer_layout, args.producer_tp, block_sizes[0]),
            ("decode", args.consumer_layout, args.consumer_tp, block_sizes[1]),
        )
    ]
    traffic = Traffic(*(engine_specs(model, config) for config in configs))
    with _progress(console) as progress:
        lines = _serve(configs, folder, requests, args, progress)
        single = SingleEngine(model, longest + args.tokens)
        expected = []
        for prompt in progress.track(prompts, description="by a single engine"):
            expected.append(single.generate(prompt, args.tokens))
    amounts = [traffic.of(request.ticket, request.blocks) for request in requests]
    return make_report(requests, amounts, expected), lines


def _serve(
    configs: list[EngineConfig], folder: Path, requests: list[Request], args: argparse.Namespace, progress: Progress
) -> list[Timeline]:
    """Runs daemons and engines until every one of `requests` has its tokens; then a long prompt both ways."""
    starting = progress.add_task("two daemons, two engines", total=1)
    steps = {step: progress.add_task(step, total=len(requests)) for step in ("prefilled", "pulled", "decoded")}
    tracing = progress.add_task("a long prompt", total=1)
    with Processes(folder) as processes:
        device = "--device", args.device
        daemons = [processes.start_daemon(f"{config.name}-daemon", config.socket, *device) for config in configs]
        prefill, decode = (_start_engine(processes, config) for config in configs)
        with closing(Router(prefill, decode, daemons, lambda step: progress.advance(steps[step]))) as router:
            router.start()
            progress.advance(starting)
            router.run(requests, args.tokens)
            router.stop()
        prefilling, decoding = configs
        lines = traced(prefilling, decoding, ModelConfig().vocab)
        progress.advance(tracing)
    return lines


def _start_engine(processes: Processes, config: EngineConfig) -> Child:
    arguments = msgspec.json.encode(config).decode()
    return processes.start(f"{config.name}-engine", f"kvd.engines.demo.{config.name}", arguments, piped=True)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:>24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM raises, so that every process that was started is ended."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
