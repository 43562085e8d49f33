"""Real vLLM servers with kvd and with vLLM's own NixlConnector, side by side: the same model and prompts.

NixlConnector runs twice: as it comes, with four threads of NIXL that compute without a pause, and without them, which
is better where cores are few. All six servers are up at once and take turns, so that whatever else the machine does
meets all alike. Those that wait for their turn are suspended.
"""

import asyncio
import contextlib
import itertools
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvd.engines.vllm_lab.catalog import make_prompt
from kvd.engines.vllm_lab.client import Completion, complete, make_body, prefill
from kvd.engines.vllm_lab.pair import KvdPair, NixlPair, Pair
from kvd.engines.vllm_lab.servers import scrape
from kvd.engines.vllm_lab.service import start_all, stop_all

MODEL: Final = "bench"
ANSWER_TOKENS: Final = 8
SETTLING_TOKENS: Final = 30
"""Tokens before, and again between, the arrivals whose effect on a decoding request is measured."""

WAKING_TOKENS: Final = 64
"""Of the first request after a pause, which is not measured."""

ARRIVALS: Final = 3
"""Requests whose blocks arrive, one after the other, beside one decoding request: they fit into the prefill side's
cache together."""

ENDLESS_TOKENS: Final = 1800
TOKENS_SECONDS: Final = 120.0
"""How long the decoding request may take for the tokens that are waited for: seconds, where nothing is wrong."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: `rounds` of every kind, none begun after `seconds`; `concurrent` requests at once."""

    prompt_tokens: int
    rounds: int
    concurrent: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Transfers:
    """What the decode side has counted so far. Times in seconds.

    `seconds` is from the first post of a read to its last byte; `whole` with all that kvd does around it (claim and
    fence), of which the in-process connector has no figure: 0.
    """

    count: float
    seconds: float
    whole: float
    nbytes: float
    descriptors: float

    def since(self, before: "Transfers") -> "Transfers":
        """What was counted between `before` and this."""
        return Transfers(
            self.count - before.count,
            self.seconds - before.seconds,
            self.whole - before.whole,
            self.nbytes - before.nbytes,
            self.descriptors - before.descriptors,
        )


@dataclass(frozen=True, slots=True)
class Request:
    """One request alone on the machine: seconds from its start, and from the end of its prefill, to the first token."""

    first_token: float
    prefill: float
    handover: float
    transfers: Transfers


@dataclass(slots=True)
class Side:
    """All that was measured with one connector. Gaps are seconds between tokens of one decoding request."""

    name: str
    requests: list[Request] = field(default_factory=list)
    quiet_gaps: list[float] = field(default_factory=list)
    busy_gaps: list[float] = field(default_factory=list)
    """While blocks of another request arrive."""
    quiet_worst: list[float] = field(default_factory=list)
    """The worst gap of each round, with nothing arriving and below while blocks arrive."""
    busy_worst: list[float] = field(default_factory=list)
    throughputs: list[float] = field(default_factory=list)
    """Tokens a second of several requests at once, prompts included."""


async def measure(models: Path, folder: Path, plan: Plan, advance: Callable[[], None]) -> list[Side]:
    """Measures all pairs; `advance` is called after the start and after every round of one side.

    Raises:
        HttpError: A server refused or broke off.
        ProcessEndedError: A server ended.

    """
    pairs: list[Pair] = [
        KvdPair(folder / "kvd", models, MODEL),
        NixlPair(folder / "nixl", models, MODEL),
        NixlPair(folder / "nixl-0", models, MODEL, threads=0),
    ]
    services = [service for pair in pairs for service in pair.services]
    seeds = itertools.count()
    try:
        await start_all(services)
        for pair in pairs:  # the first request of a pair pays for handshakes and page faults
            await pair.complete(make_prompt(plan.prompt_tokens, next(seeds)), ANSWER_TOKENS)
        for pair in pairs:
            _suspend(pair)
        advance()
        return await _rounds(pairs, plan, seeds, advance)
    finally:
        for pair in pairs:
            _resume(pair)
        stop_all(services)


def _suspend(pair: Pair) -> None:
    for server in (pair.prefill, pair.decode):
        server.signal_group(signal.SIGSTOP)


def _resume(pair: Pair) -> None:
    for server in (pair.prefill, pair.decode):
        if server.running:
            server.signal_group(signal.SIGCONT)


async def _rounds(
    pairs: Sequence[Pair], plan: Plan, seeds: "itertools.count[int]", advance: Callable[[], None]
) -> list[Side]:
    sides = [Side(pair.title) for pair in pairs]
    deadline = time.monotonic() + plan.seconds
    turns = list(zip(pairs, sides, strict=True))
    for _ in range(plan.rounds):
        if time.monotonic() > deadline:
            break
        first = next(seeds)
        for pair, side in turns:
            _resume(pair)
            await pair.complete(make_prompt(WAKING_TOKENS, 1000 * first + 999), ANSWER_TOKENS)
            await _alone(pair, side, make_prompt(plan.prompt_tokens, 1000 * first))
            prompts = [make_prompt(plan.prompt_tokens, 1000 * first + number) for number in range(1, 1 + ARRIVALS)]
            await _beside(pair, side, prompts)
            many = [make_prompt(plan.prompt_tokens, 1000 * first + 100 + number) for number in range(plan.concurrent)]
            await _together(pair, side, many)
            _suspend(pair)
            advance()
        turns.reverse()
    return sides


async def _alone(pair: Pair, side: Side, prompt: list[int]) -> None:
    body = make_body(MODEL, prompt, ANSWER_TOKENS)
    before = await transfers(pair)
    start = time.perf_counter()
    params = await prefill(pair.prefill.url, body)
    prefilled = time.perf_counter()
    completion = await complete(pair.decode.url, body | {"kv_transfer_params": params})
    first = completion.times[0]
    counted = (await transfers(pair)).since(before)
    side.requests.append(Request(first - start, prefilled - start, first - prefilled, counted))


async def _beside(pair: Pair, side: Side, prompts: Sequence[list[int]]) -> None:
    """A request decodes on the decode side, alone and then while blocks of others arrive one after the other."""
    bodies = [make_body(MODEL, prompt, 1) for prompt in prompts]
    offered = [body | {"kv_transfer_params": await prefill(pair.prefill.url, body)} for body in bodies]
    busy: list[tuple[float, float]] = []
    async with _decoding(pair) as decoding:
        await _tokens(decoding, 2 * SETTLING_TOKENS)
        for body in offered:
            start = time.perf_counter()
            arrived = await complete(pair.decode.url, body)
            busy.append((start, arrived.times[-1]))
            await _tokens(decoding, SETTLING_TOKENS)
    quiet, during = split_gaps(decoding.times[10:], busy)
    side.quiet_gaps += quiet
    side.busy_gaps += during
    side.quiet_worst.append(max(quiet))
    side.busy_worst.append(max(during))


def split_gaps(times: Sequence[float], busy: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """The gaps between `times` that lie outside all intervals of `busy`, and those that share a moment with one."""
    quiet: list[float] = []
    during: list[float] = []
    for earlier, later in itertools.pairwise(times):
        shared = any(earlier < end and start < later for start, end in busy)
        (during if shared else quiet).append(later - earlier)
    return quiet, during


@contextlib.asynccontextmanager
async def _decoding(pair: Pair) -> AsyncIterator[Completion]:
    """A request that the decode side computes alone, for as long as the context lasts."""
    completion = Completion()
    body = make_body(MODEL, make_prompt(64, seed=0), ENDLESS_TOKENS)
    task = asyncio.create_task(complete(pair.decode.url, body, completion))
    try:
        yield completion
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _tokens(completion: Completion, more: int) -> None:
    """Returns when there are so many more tokens; TimeoutError if they do not come."""
    enough = len(completion.tokens) + more
    async with asyncio.timeout(TOKENS_SECONDS):
        while len(completion.tokens) < enough:  # noqa: ASYNC110 - tokens come every few milliseconds
            await asyncio.sleep(0.005)


async def _together(pair: Pair, side: Side, prompts: Sequence[list[int]]) -> None:
    start = time.perf_counter()
    await asyncio.gather(*(pair.complete(prompt, ANSWER_TOKENS) for prompt in prompts))
    tokens = sum(len(prompt) + ANSWER_TOKENS for prompt in prompts)
    side.throughputs.append(tokens / (time.perf_counter() - start))


async def transfers(pair: Pair) -> Transfers:
    """What the decode side of `pair` has counted."""
    if isinstance(pair, KvdPair):
        daemon = await scrape(pair.daemons["decode"])
        return Transfers(
            count=daemon.total("kvd_read_duration_seconds_count"),
            seconds=daemon.total("kvd_read_duration_seconds_sum"),
            whole=daemon.total("kvd_pull_duration_seconds_sum"),
            nbytes=daemon.total("kvd_read_bytes_total"),
            descriptors=daemon.total("kvd_read_descriptors_total"),
        )
    server = await scrape(pair.decode)
    return Transfers(
        count=server.total("vllm:nixl_xfer_time_seconds_count"),
        seconds=server.total("vllm:nixl_xfer_time_seconds_sum"),
        whole=0.0,
        nbytes=server.total("vllm:nixl_bytes_transferred_sum"),
        descriptors=server.total("vllm:nixl_num_descriptors_sum"),
    )
