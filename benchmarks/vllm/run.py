"""Real vLLM servers with kvd and with vLLM's own NixlConnector, side by side: the same model and prompts.

vLLM runs as users start it: engine and worker spin while they wait for each other. There is a pair with kvd for each
kind of groups that daemons and engines may be in (`benchmarks.vllm.groups`). NixlConnector runs twice: with its default
of four NIXL threads, and without them, which is better if cores are few. The pairs take turns, so that whatever else
the machine does hits all alike; those that wait are suspended. Each pair has two turns per round: pinned, with one core
per server, and unpinned. Daemons are never pinned. A request that fails ends the measurement, unless it is the first
of a pair.
"""

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.vllm.groups import place
from benchmarks.vllm.servers import MODEL, PLACEMENTS, as_users_run, bear_suspension, resume, suspend, until_served
from tests.vllm.testbed.catalog import make_prompt
from tests.vllm.testbed.client import Completion, complete, make_body, prefill
from tests.vllm.testbed.pair import KvdPair, NixlPair, Pair
from tests.vllm.testbed.servers import scrape
from tests.vllm.testbed.service import start_all, stop_all

BLOCKS: Final = 384
"""Blocks of a KV cache: 16 prompts of 600 tokens, and a request that decodes meanwhile."""
ANSWER_TOKENS: Final = 8
SETTLING_TOKENS: Final = 30
"""Tokens before, and between, the arrivals whose effect on a decoding request is measured."""
WAKING_TOKENS: Final = 64
"""Tokens of the first request after a pause, which is not measured."""
ENDLESS_TOKENS: Final = 1800
TOKENS_SECONDS: Final = 120.0
"""Seconds the decoding request may take for the tokens awaited; if all is well it takes a few."""

Figures = dict[str, float]
"""Results of one turn, by the names of `benchmarks.vllm.report.FIGURES`: seconds, bytes, counts."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: `rounds`, stopped after `seconds`; one throughput per number in `concurrent`."""

    prompt_tokens: int
    rounds: int
    concurrent: tuple[int, ...]
    seconds: float
    groups: tuple[str, ...] = ("session",)
    """A pair with kvd for each, of `benchmarks.vllm.groups.GROUPS`."""
    placements: tuple[str, ...] = PLACEMENTS
    arrivals: int = 6
    """Requests per turn whose blocks arrive one after the other while another request decodes."""
    kills: bool = False
    """Whether each turn of kvd ends with its decode daemon killed and started again."""

    @property
    def pairs(self) -> int:
        """How many pairs take turns."""
        return len(self.groups) + 2


@dataclass(slots=True)
class Side:
    """The rounds measured with one connector in one placement."""

    name: str
    placement: str
    rounds: list[Figures] = field(default_factory=list)

    @property
    def ours(self) -> bool:
        """Whether kvd moves the blocks."""
        return self.name.startswith(KvdPair.title)


async def measure(models: Path, folder: Path, plan: Plan, sides: list[Side], advance: Callable[[], None]) -> None:
    """Measures all pairs into `sides`, kvd's first in each placement; calls `advance` after each step.

    If this raises, `sides` keeps what has been measured.

    Raises:
        BadRequest: `BAD_CONFIG`, there can be no such groups.
        HttpError: A server refused a request or broke the connection.
        ProcessEndedError: A server ended.
        TimeoutError: The plan's time is over.

    """
    with contextlib.ExitStack() as stack:
        await _measure(_pairs(models, folder, plan.groups, stack), plan, sides, advance)


def _pairs(models: Path, folder: Path, groups: Sequence[str], stack: contextlib.ExitStack) -> list[Pair]:
    """Their processes are to end before `stack` does."""
    ours = []
    for group in groups:
        ours.append(KvdPair(folder / f"kvd-{group}", models, MODEL, blocks=BLOCKS))
        place(group, ours[-1], stack)
        as_users_run(ours[-1])
        if group != "session":
            ours[-1].title = f"kvd, {group}"
    return [
        *ours,
        NixlPair(folder / "nixl", models, MODEL, blocks=BLOCKS),
        NixlPair(folder / "nixl-0", models, MODEL, blocks=BLOCKS, threads=0),
    ]


async def _measure(pairs: list[Pair], plan: Plan, sides: list[Side], advance: Callable[[], None]) -> None:
    seeds = itertools.count()
    turns = [(pair, Side(pair.title, placement)) for placement in plan.placements for pair in pairs]
    sides += [side for _, side in turns]
    try:
        async with asyncio.timeout(plan.seconds):
            for pair in pairs:  # one by one: waiting servers keep their cores busy
                bear_suspension(pair)
                await start_all(pair.services)
                # The first request of a pair pays for handshakes and page faults.
                await _served(pair, plan.prompt_tokens, ANSWER_TOKENS, seeds)
                suspend(pair)
                advance()
            for _ in range(plan.rounds):
                first = 1000 * next(seeds)
                for pair, side in turns:
                    resume(pair, side.placement)
                    side.rounds.append(await _turn(pair, plan, first))
                    suspend(pair)
                    advance()
                    first += 100
                turns.reverse()
    finally:
        for pair in pairs:
            resume(pair, "unpinned")
            stop_all(pair.services)


async def _turn(pair: Pair, plan: Plan, first: int) -> Figures:
    """One turn; its prompts have the hundred seeds from `first` on."""
    seeds = itertools.count(first)
    await pair.complete(make_prompt(WAKING_TOKENS, next(seeds)), ANSWER_TOKENS)
    figures = await _alone(pair, make_prompt(plan.prompt_tokens, next(seeds)))
    figures |= await _beside(pair, [make_prompt(plan.prompt_tokens, next(seeds)) for _ in range(plan.arrivals)])
    for number in plan.concurrent:
        prompts = [make_prompt(plan.prompt_tokens, next(seeds)) for _ in range(number)]
        figures[f"tokens_a_second_{number}"] = await _together(pair, prompts)
    if plan.kills and isinstance(pair, KvdPair):
        figures["serves_again"] = await _killed(pair, plan.prompt_tokens, seeds)
    return figures


async def _alone(pair: Pair, prompt: list[int]) -> Figures:
    body = make_body(MODEL, prompt, ANSWER_TOKENS)
    start = time.perf_counter()
    params = await prefill(pair.prefill.url, body)
    prefilled = time.perf_counter()
    completion = await complete(pair.decode.url, body | {"kv_transfer_params": params})
    return {"first_token": completion.times[0] - start, "handover": completion.times[0] - prefilled}


async def _beside(pair: Pair, prompts: Sequence[list[int]]) -> Figures:
    """A request decodes alone, then while blocks of others arrive one after the other."""
    bodies = [make_body(MODEL, prompt, 1) for prompt in prompts]
    offered = [body | {"kv_transfer_params": await prefill(pair.prefill.url, body)} for body in bodies]
    busy: list[tuple[float, float]] = []
    engine = daemons = 0.0
    counted = [await _counted(pair)]
    async with _decoding(pair) as decoding:
        await _tokens(decoding, 2 * SETTLING_TOKENS)
        for body in offered:
            engine -= pair.decode.processor_seconds()
            daemons -= _processor_seconds_of_daemons(pair)
            start = time.perf_counter()
            arrived = await complete(pair.decode.url, body)
            busy.append((start, arrived.times[-1]))
            engine += pair.decode.processor_seconds()
            daemons += _processor_seconds_of_daemons(pair)
            await _tokens(decoding, SETTLING_TOKENS)
            counted.append(await _counted(pair))
    quiet, during = split_gaps(decoding.times[10:], busy)
    before, after = counted[0], counted[-1]
    pulls = max(1.0, after["pulls"] - before["pulls"])
    each = [later["pull"] - earlier["pull"] for earlier, later in itertools.pairwise(counted) if "pull" in later]
    return {
        "at_decode": statistics.median(end - start for start, end in busy),
        "at_decode_worst": max(end - start for start, end in busy),
        **{name: (after[name] - before[name]) / pulls for name in after if name != "pulls"},
        **({"pull_worst": max(each)} if each else {}),
        "engine_processor": engine / len(busy),
        "daemons_processor": daemons / len(busy),
        **_spread("quiet", quiet),
        **_spread("busy", during),
    }


async def _killed(pair: KvdPair, prompt_tokens: int, seeds: Iterator[int]) -> float:
    """Seconds from the kill of the decode daemon, started again at once, to a first token whose blocks it pulled.

    Requests meanwhile end in an error, or wait, while another one decodes.
    """
    daemon = pair.daemons["decode"]
    async with _decoding(pair) as decoding:
        await _tokens(decoding, SETTLING_TOKENS)
        killed = time.perf_counter()
        daemon.kill()
        daemon.start()
        return (await _served(pair, prompt_tokens, 1, seeds)).times[0] - killed


async def _served(pair: Pair, prompt_tokens: int, tokens: int, seeds: Iterator[int]) -> Completion:
    return await until_served(lambda: pair.complete(make_prompt(prompt_tokens, next(seeds)), tokens))


def _spread(name: str, gaps: Sequence[float]) -> Figures:
    p50, p99, worst = np.quantile(gaps, (0.5, 0.99, 1.0))
    return {f"{name}_p50": float(p50), f"{name}_p99": float(p99), f"{name}_worst": float(worst)}


def split_gaps(times: Sequence[float], busy: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """The gaps between `times` outside all intervals of `busy`, and those that overlap one."""
    quiet: list[float] = []
    during: list[float] = []
    for earlier, later in itertools.pairwise(times):
        shared = any(earlier < end and start < later for start, end in busy)
        (during if shared else quiet).append(later - earlier)
    return quiet, during


@contextlib.asynccontextmanager
async def _decoding(pair: Pair) -> AsyncIterator[Completion]:
    """A request that the decode side computes by itself while the context lasts."""
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
    """Waits for `more` tokens; raises TimeoutError if they do not come."""
    enough = len(completion.tokens) + more
    async with asyncio.timeout(TOKENS_SECONDS):
        while len(completion.tokens) < enough:  # noqa: ASYNC110 - tokens come every few milliseconds
            await asyncio.sleep(0.005)


async def _together(pair: Pair, prompts: Sequence[list[int]]) -> float:
    """Tokens per second, prompts included, of requests sent at once."""
    start = time.perf_counter()
    await asyncio.gather(*(pair.complete(prompt, ANSWER_TOKENS) for prompt in prompts))
    return sum(len(prompt) + ANSWER_TOKENS for prompt in prompts) / (time.perf_counter() - start)


def _processor_seconds_of_daemons(pair: Pair) -> float:
    daemons = pair.daemons.values() if isinstance(pair, KvdPair) else ()
    return sum(daemon.processor_seconds() for daemon in daemons)


async def _counted(pair: Pair) -> Mapping[str, float]:
    """The decode side's counters.

    `transfer` is from the first post of a read to its last byte, which NixlConnector sees only at engine steps;
    `posting` is the time of the posts, which copy on the same host; `pull` is all of kvd's pull, with claim and fence.
    """
    if isinstance(pair, KvdPair):
        daemon = await scrape(pair.daemons["decode"])
        return {
            "pulls": daemon.total("kvd_read_duration_seconds_count"),
            "transfer": daemon.total("kvd_read_duration_seconds_sum"),
            "pull": daemon.total("kvd_pull_duration_seconds_sum"),
            "bytes": daemon.total("kvd_read_bytes_total"),
            "descriptors": daemon.total("kvd_read_descriptors_total"),
        }
    server = await scrape(pair.decode)
    return {
        "pulls": server.total("vllm:nixl_xfer_time_seconds_count"),
        "transfer": server.total("vllm:nixl_xfer_time_seconds_sum"),
        "posting": server.total("vllm:nixl_post_time_seconds_sum"),
        "bytes": server.total("vllm:nixl_bytes_transferred_sum"),
        "descriptors": server.total("vllm:nixl_num_descriptors_sum"),
    }
