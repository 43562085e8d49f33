"""How long the first token takes after a long prefill: `python -m benchmarks.vllm.growing`.

One model on a pair of servers with kvd and on one with vLLM's NixlConnector, prefills in chunks of 512 tokens, each
server pinned to a core. In turns: kvd with both servers asked at once, kvd with one after the other, and
NixlConnector. Measured are the time from the end of the prefill, as its answer says it, to the first token, for short
and long prompts; and the time of the long prefill, with a reader and without.
"""

import argparse
import asyncio
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.command import make_parser, run
from benchmarks.vllm.servers import MODEL, TOKEN_BYTES, bear_suspension, model_folder, resume, suspend, until_served
from kvd.bench.report import write_json
from kvd.errors import ErrorCode, refusal
from tests.vllm.testbed.catalog import make_prompt
from tests.vllm.testbed.client import complete, make_body, prefill
from tests.vllm.testbed.pair import KvdPair, NixlPair, Pair
from tests.vllm.testbed.service import start_all, stop_all

BLOCKS: Final = 256
ANSWER_TOKENS: Final = 4
FLAGS: Final = ("--max-num-batched-tokens", "512", "--max-model-len", "4096")

AT_ONCE, IN_TURN, NIXL = "kvd, both at once", "kvd, one after the other", "NixlConnector"


@dataclass(slots=True)
class Side:
    """What one way of serving took, in seconds by the prompt's tokens."""

    handover: dict[int, list[float]] = field(default_factory=dict)
    """From the end of the prefill to the first token."""
    prefill: dict[int, list[float]] = field(default_factory=dict)
    first_token: dict[int, list[float]] = field(default_factory=dict)
    """From the request to the first token."""
    step: dict[int, list[float]] = field(default_factory=dict)
    """From a token to the next one: what the decode server computes for the first one, too."""

    def add(self, tokens: int, begun: float, prefilled: float, first: float, step: float) -> None:
        """One request."""
        self.step.setdefault(tokens, []).append(step)
        self.handover.setdefault(tokens, []).append(first - prefilled)
        self.prefill.setdefault(tokens, []).append(prefilled - begun)
        self.first_token.setdefault(tokens, []).append(first - begun)


async def request(pair: Pair, prompt: list[int], *, at_once: bool) -> tuple[float, float, float, float]:
    """When it was sent, when its prefill was answered, when its first token came, and how long one took after that."""
    body = make_body(MODEL, prompt, ANSWER_TOKENS)
    prefilled = 0.0

    def note(_: "asyncio.Task[dict[str, Any]]") -> None:
        nonlocal prefilled
        prefilled = time.perf_counter()

    begun = time.perf_counter()
    if at_once and isinstance(pair, KvdPair):
        prefilling, decoding = await pair.begin_early(body)
        prefilling.add_done_callback(note)
        completion, _ = await asyncio.gather(complete(pair.decode.url, decoding), prefilling)
    else:
        params = await prefill(pair.prefill.url, body)
        prefilled = time.perf_counter()
        completion = await complete(pair.decode.url, body | {"kv_transfer_params": params})
    step = statistics.median(after - before for before, after in itertools.pairwise(completion.times))
    return begun, prefilled, completion.times[0], step


async def measure_all(folder: Path, prompts: Sequence[int], rounds: int, seconds: float) -> dict[str, Side]:
    """All ways, in turns, until `rounds` or `seconds` are over; the servers of others are suspended meanwhile."""
    kvd, nixl = (
        KvdPair(folder / "kvd", folder, MODEL, blocks=BLOCKS),
        NixlPair(folder / "nixl", folder, MODEL, blocks=BLOCKS),
    )
    ways: dict[str, Pair] = {AT_ONCE: kvd, IN_TURN: kvd, NIXL: nixl}
    pairs: list[Pair] = [kvd, nixl]
    sides = {name: Side() for name in ways}
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await _measure_pairs(pairs, ways, prompts, rounds, sides)
    finally:
        for pair in pairs:
            resume(pair, "pinned")
            stop_all(pair.services)
    return sides


async def _measure_pairs(
    pairs: Sequence[Pair], ways: dict[str, Pair], prompts: Sequence[int], rounds: int, sides: dict[str, Side]
) -> None:
    seeds = itertools.count()
    for pair in pairs:
        for server in (pair.prefill, pair.decode):
            server.flags = FLAGS
        bear_suspension(pair)
        await start_all(pair.services)
        await until_served(partial(request, pair, make_prompt(64, next(seeds)), at_once=False))
        for at_once, tokens in itertools.product((False, True), prompts):  # connections, pages
            await request(pair, make_prompt(tokens, next(seeds)), at_once=at_once)
        suspend(pair)
    for number in range(rounds):
        order = list(ways.items())
        for name, pair in order if number % 2 else order[::-1]:
            resume(pair, "pinned")
            await request(pair, make_prompt(64, next(seeds)), at_once=False)  # wakes them up
            for tokens in prompts:
                times = await request(pair, make_prompt(tokens, next(seeds)), at_once=name == AT_ONCE)
                sides[name].add(tokens, *times)
            suspend(pair)


def report(sides: dict[str, Side], prompts: Sequence[int]) -> None:
    """Prints medians."""
    sizes = " and ".join(f"{tokens} tokens ({tokens * TOKEN_BYTES / 1e6:.0f} MB)" for tokens in prompts)
    print(f"prompts of {sizes}, medians of {len(sides[AT_ONCE].handover[prompts[0]])} rounds")
    for name, side in sides.items():
        short, long = (1e3 * statistics.median(side.handover[tokens]) for tokens in prompts)
        text = f"{name:>24}: end of prefill to first token {short:.0f} and {long:.0f} ms (x {long / short:.2f})"
        short, long = (1e3 * statistics.median(side.first_token[tokens]) for tokens in prompts)
        text += f"; request to first token {short:.0f} and {long:.0f} ms"
        short, long = (1e3 * statistics.median(side.step[tokens]) for tokens in prompts)
        print(f"{text}; each token after it {short:.0f} and {long:.0f} ms")
    read, alone = (1e3 * statistics.median(sides[name].prefill[prompts[-1]]) for name in (AT_ONCE, IN_TURN))
    text = f"a prefill of {prompts[-1]} tokens takes {read:.0f} ms while it is read, {alone:.0f} ms if nobody reads it"
    print(f"{text} (x {read / alone:.3f})")


def _measure(args: argparse.Namespace) -> None:
    with model_folder("growing") as folder:
        sides = asyncio.run(measure_all(folder, args.prompts, args.rounds, args.seconds))
    if not all(args.prompts[-1] in side.handover for side in sides.values()):
        raise refusal(ErrorCode.CANCELLED, f"no round was over after {args.seconds:.0f} s; raise --seconds")
    report(sides, args.prompts)
    write_json(args.json, {"sides": sides})


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = make_parser("vllm.growing", __doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, nargs=2, default=[500, 3000], help="tokens (default: 500 3000)")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1200.0, help="stop after this long and report what there is")
    return run(parser, _measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
