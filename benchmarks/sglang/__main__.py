"""The time to the first token with SGLang, prefill and decode on two servers: `python -m benchmarks.sglang`.

One model on a pair of servers with kvd, on one with SGLang's own backend `nixl` over UCX, and on a single server. They
are asked in turns; the servers of the others are suspended meanwhile. Each server has a core of its own where there are
two. Measured are the time from a request to its first token at the decode server and to its last one.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.command import make_parser, run
from benchmarks.estimate import cell, estimate
from kvd.bench.report import write_json
from kvd.errors import ErrorCode, refusal
from kvd.processes import ProcessEndedError
from tests.sglang.testbed.client import PATH, make_body
from tests.sglang.testbed.pair import KvdPair, NixlPair, Pair
from tests.sglang.testbed.servers import Engine, Server
from tests.vllm.testbed.catalog import make_prompt, write_models
from tests.vllm.testbed.http import HttpError, post, request
from tests.vllm.testbed.service import Service, start_all, stop_all

MODEL: Final = "bench"
TOKEN_BYTES: Final = 131_072
CACHE_TOKENS: Final = 4096
"""512 MiB a server."""
LONGEST: Final = 2048
ANSWER_TOKENS: Final = 8
FLAGS: Final = ("--chunked-prefill-size", "256", "--context-length", str(LONGEST))

SINGLE, KVD, NIXL = "one server", "kvd", "nixl"


@dataclass(slots=True)
class Side:
    """What one way of serving took, in seconds by the prompt's tokens: a number a round."""

    first_token: dict[int, list[float]] = field(default_factory=dict)
    last_token: dict[int, list[float]] = field(default_factory=dict)

    def add(self, tokens: int, first: float, last: float) -> None:
        """One request."""
        self.first_token.setdefault(tokens, []).append(first)
        self.last_token.setdefault(tokens, []).append(last)


async def ask(way: Pair | Server, prompt: list[int]) -> tuple[float, float]:
    """Seconds from the request to its first and to its last token.

    Raises:
        HttpError: It was not answered, or with fewer tokens.

    """
    body = make_body(prompt, ANSWER_TOKENS, stream=True)
    begun = time.perf_counter()
    if isinstance(way, Server):
        return await _streamed(way, body, begun)
    body = way.roomed(body)
    prefill = asyncio.create_task(post(way.prefill.url, PATH, body | {"stream": False}))
    try:
        times = await _streamed(way.decode, body, begun)
        await prefill
    finally:
        prefill.cancel()
    return times


async def _streamed(server: Server, body: dict[str, Any], begun: float) -> tuple[float, float]:
    first, told = 0.0, 0
    async with request(server.url, PATH, body) as response:
        async for event in response.events():
            told = len(event.get("output_ids", ()))
            first = first or (time.perf_counter() - begun if told else 0.0)
    if told != ANSWER_TOKENS:
        raise HttpError(response.status, f"{server.name}: {told} tokens of {ANSWER_TOKENS}")
    return first, time.perf_counter() - begun


async def measure_all(
    folder: Path, names: Sequence[str], prompts: Sequence[int], rounds: int, seconds: float
) -> dict[str, Side]:
    """The ways of these names, in turns, until `rounds` or `seconds` are over.

    Raises:
        ProcessEndedError: A server did not start.

    """
    engine = Engine(folder, MODEL, CACHE_TOKENS)
    makers: dict[str, Callable[[], Pair | Server]] = {
        SINGLE: lambda: Server("single", folder, engine),
        KVD: lambda: KvdPair(folder / KVD, engine),
        NIXL: lambda: NixlPair(folder / NIXL, engine),
    }
    ways: dict[str, Pair | Server] = {name: makers[name]() for name in names}
    sides = {name: Side() for name in ways}
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await _measure(ways, prompts, rounds, sides)
    finally:
        for way in ways.values():
            _signal(way, signal.SIGCONT)
            stop_all(_services(way))
    return sides


async def _measure(ways: dict[str, Pair | Server], prompts: Sequence[int], rounds: int, sides: dict[str, Side]) -> None:
    seeds = itertools.count()
    for way in ways.values():
        for server in _servers(way):
            server.flags += FLAGS
        await start_all(_services(way))
        for tokens in prompts:  # connections, pages
            await ask(way, make_prompt(tokens, next(seeds)))
        _signal(way, signal.SIGSTOP)
    for number in range(rounds):
        order = list(ways.items())
        for name, way in order if number % 2 else order[::-1]:
            _signal(way, signal.SIGCONT)
            await ask(way, make_prompt(64, next(seeds)))  # wakes them up
            for tokens in prompts:
                sides[name].add(tokens, *await ask(way, make_prompt(tokens, next(seeds))))
            _signal(way, signal.SIGSTOP)


def _servers(way: Pair | Server) -> list[Server]:
    return [way] if isinstance(way, Server) else [way.prefill, way.decode]


def _services(way: Pair | Server) -> Sequence[Service]:
    return [way] if isinstance(way, Server) else way.services


def _signal(way: Pair | Server, number: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    for server, core in zip(_servers(way), (cores[0], cores[-1]), strict=False):
        if server.running:
            server.keep_to({core})
            server.signal_group(number)


def table(sides: dict[str, Side], prompts: Sequence[int]) -> str:
    """Medians with their intervals, in Markdown; kvd over the others in the last columns."""
    names = [name for name in sides if sides[name].first_token]
    others = [name for name in names if name != KVD]
    headings = ["prompt", "", *names, *(f"{KVD} / {name}" for name in others)]
    lines = [headings, ["---"] * len(headings)]
    for tokens in prompts:
        for what, text in (("first_token", "first token"), ("last_token", f"{ANSWER_TOKENS} tokens")):
            columns = {name: getattr(sides[name], what)[tokens] for name in names}
            found = [cell(estimate(column), 1e3, "ms") for column in columns.values()]
            ratios = [cell(estimate(columns[KVD], columns[name])) for name in others]
            lines.append([f"{tokens} tokens, {tokens * TOKEN_BYTES / 1e6:.0f} MB", text, *found, *ratios])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _run(args: argparse.Namespace) -> None:
    if importlib.util.find_spec("sglang") is None:
        raise refusal(ErrorCode.BAD_CONFIG, "SGLang is not installed: make setup-sglang, then .venv-sglang/bin/python")
    longest = LONGEST - ANSWER_TOKENS
    if not all(0 < tokens <= longest for tokens in args.prompts) or args.rounds < 1:
        raise refusal(ErrorCode.BAD_CONFIG, f"--prompts must be 1 to {longest}, --rounds 1 or more")
    names = [name for name in (KVD, NIXL, SINGLE) if name != NIXL or not args.without_nixl]
    with tempfile.TemporaryDirectory(prefix="kvd-sglang-") as name:
        folder = Path(name)
        write_models(folder, MODEL)
        try:
            sides = asyncio.run(measure_all(folder, names, args.prompts, args.rounds, args.seconds))
        except (HttpError, ProcessEndedError) as error:
            raise refusal(ErrorCode.CANCELLED, f"{type(error).__name__}: {error}") from error
    rounds = min(len(side.first_token.get(args.prompts[-1], ())) for side in sides.values())
    if not rounds:
        raise refusal(ErrorCode.CANCELLED, f"no round was over after {args.seconds:.0f} s; raise --seconds")
    print(f"medians of {rounds} rounds, and their 95 % intervals\n\n{table(sides, args.prompts)}")
    write_json(args.json, {"sides": sides})


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = make_parser("sglang", __doc__.partition("\n")[0])
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[128, 600, 1900], help="tokens (default: 128 600 1900)"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1200.0, help="stop after this long and report what there is")
    parser.add_argument("--without-nixl", action="store_true", help="kvd beside one server alone")
    return run(parser, _run, arguments)


if __name__ == "__main__":
    sys.exit(main())
