"""Servers under load as vLLM measures it: kvd and NixlConnector behind `kvd router`, and one server on their cores.

A pair of servers with kvd, one with vLLM's NixlConnector, both behind `kvd router`, which passes the parameters of
either on, and one plain server on the same cores. One after the other, as they do not all fit into a small machine's
memory. Requests of one turn are sent by `vllm bench serve`. It knows no conversations: those are sent from here, each
turn when the one before was answered. Requests, and conversations, come at random moments, the same ones for all.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.vllm.serve.bench import Bench, bench_serve
from benchmarks.vllm.servers import MODEL, as_users_run, resume, until_served
from tests.vllm.testbed.catalog import make_prompt
from tests.vllm.testbed.client import complete, make_body
from tests.vllm.testbed.http import HttpError
from tests.vllm.testbed.pair import KvdPair, NixlPair, Pair
from tests.vllm.testbed.servers import Engine, RouterProcess, Server
from tests.vllm.testbed.service import Service, start_all, stop_all

BLOCKS: Final = 384
"""Blocks of a KV cache: 12,288 tokens, 1.6 GB."""
THREADS: Final = 2
"""That compute in the plain server: it has the cores of both servers of a pair."""

SYSTEMS: Final = ("kvd", "NixlConnector", "one server")


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests with prompts of `asked` tokens and answers of `answered`; in conversations each turn adds as many."""

    name: str
    asked: int
    answered: int
    turns: int = 1


WORKLOADS: Final = (
    Workload("short prompts (100)", 100, 32),
    Workload("long prompts (600)", 600, 32),
    Workload("five turns of 250", 150, 100, 5),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """What one system did with a workload at `rate` requests a second; times in ms, of requests that did not fail."""

    system: str
    workload: str
    rate: float
    completed: int
    failed: int
    tokens_a_second: float
    """Of answers."""
    first_token_p50: float
    first_token_p99: float
    between_p50: float
    """Between two tokens of an answer."""
    between_p99: float


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: requests arrive for `window` seconds; all is over after `seconds`."""

    systems: Sequence[str]
    rates: Sequence[float]
    window: float
    seconds: float

    @property
    def steps(self) -> int:
        """How many times something is measured."""
        return len(self.systems) * len(self.rates) * len(WORKLOADS)


class System:
    """Servers that answer at `url`."""

    def __init__(self, name: str, folder: Path, models: Path) -> None:
        self.name = name
        self.tokenizer = models / MODEL
        self._pair: Pair | None = None
        if name == "one server":
            server = Server("single", folder, Engine(models, MODEL, BLOCKS))
            server.variables = {"OMP_NUM_THREADS": str(THREADS)}
            self.services: list[Service] = [server]
            self.url = server.url
            return
        if name == "kvd":
            self._pair = pair = KvdPair(folder, models, MODEL, policy="recompute", blocks=BLOCKS)
            as_users_run(pair)
        else:
            self._pair = NixlPair(folder, models, MODEL, blocks=BLOCKS)
        router = RouterProcess(folder, self._pair.prefill, self._pair.decode)
        self.services = [*self._pair.services, router]
        self.url = router.url

    async def start(self) -> None:
        """Starts it, and pays what its first requests cost: handshakes, and pages that are touched first."""
        await start_all(self.services)
        if self._pair is not None:
            resume(self._pair, "pinned")
        for seed in range(3):
            await until_served(partial(complete, self.url, make_body(MODEL, make_prompt(600, seed), 8)))


async def measure(folder: Path, plan: Plan, found: list[Measured], advance: Callable[[], None]) -> None:
    """Measures into `found`, which keeps what there is if this raises.

    Raises:
        HttpError: `vllm bench serve` ended.
        ProcessEndedError: A server ended.
        TimeoutError: The plan's time is over.

    """
    async with asyncio.timeout(plan.seconds), bench_serve(folder / "bench-serve.log") as bench:
        for name in plan.systems:
            (place := folder / name.replace(" ", "-")).mkdir()
            system = System(name, place, folder)
            try:
                await system.start()
                for workload, rate in itertools.product(WORKLOADS, plan.rates):
                    if workload.turns == 1:
                        found.append(await _requests(system, workload, rate, plan.window, bench))
                    else:
                        found.append(await _conversations(system, workload, rate, plan.window))
                    advance()
            finally:
                stop_all(system.services)


async def _requests(system: System, workload: Workload, rate: float, window: float, bench: Bench) -> Measured:
    """Of one turn."""
    flags = ["--backend", "openai", "--base-url", system.url, "--model", MODEL, "--tokenizer", str(system.tokenizer)]
    flags += ["--dataset-name", "random", "--random-input-len", str(workload.asked), "--random-range-ratio", "0"]
    flags += ["--random-output-len", str(workload.answered), "--ignore-eos", "--temperature", "0"]
    flags += ["--request-rate", str(rate), "--num-prompts", str(max(2, round(rate * window)))]
    flags += ["--seed", str(round(1000 * rate) + workload.asked), "--ready-check-timeout-sec", "0", "--disable-tqdm"]
    flags += ["--percentile-metrics", "ttft,itl", "--metric-percentiles", "50,99"]
    figures = await bench(flags)
    return Measured(
        system=system.name,
        workload=workload.name,
        rate=rate,
        completed=figures["completed"],
        failed=figures["failed"],
        tokens_a_second=figures["output_throughput"],
        first_token_p50=figures["p50_ttft_ms"],
        first_token_p99=figures["p99_ttft_ms"],
        between_p50=figures["p50_itl_ms"],
        between_p99=figures["p99_itl_ms"],
    )


async def _conversations(system: System, workload: Workload, rate: float, window: float) -> Measured:
    """So many that all their turns make `rate` requests a second."""
    chance = random.Random(f"{workload.name} {rate}")  # noqa: S311 - no secret
    talk = _Talk(system.url, workload)
    begun = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(max(1, round(rate * window / workload.turns))):
            if number:
                await asyncio.sleep(chance.expovariate(rate / workload.turns))
            group.create_task(talk.converse(f"{rate} {number}", chance.randrange(1 << 20)))
    lasted = time.perf_counter() - begun
    return Measured(
        system=system.name,
        workload=workload.name,
        rate=rate,
        completed=len(talk.first),
        failed=talk.failed,
        tokens_a_second=len(talk.first) * workload.answered / lasted,
        first_token_p50=percentile(talk.first, 50),
        first_token_p99=percentile(talk.first, 99),
        between_p50=percentile(talk.gaps, 50),
        between_p99=percentile(talk.gaps, 99),
    )


@dataclass(slots=True)
class _Talk:
    """Conversations with the servers at `url`, and what their turns took, in seconds."""

    url: str
    workload: Workload
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    failed: int = 0
    """Turns, and those that would have followed."""

    async def converse(self, name: str, seed: int) -> None:
        """One conversation. The questions are those of `seed`."""
        tokens: list[int] = []
        for turn in range(self.workload.turns):
            tokens += make_prompt(self.workload.asked, seed=100 * seed + turn)
            body = make_body(MODEL, list(tokens), self.workload.answered)
            begun = time.perf_counter()
            try:
                got = await complete(self.url, body, headers={"X-Conversation-Id": name})
            except HttpError:
                self.failed += self.workload.turns - turn
                return
            self.first.append(got.times[0] - begun)
            self.gaps += got.gaps
            tokens += got.tokens


def percentile(seconds: Sequence[float], percent: float) -> float:
    """In milliseconds; not a number if there is no value."""
    return 1e3 * float(np.percentile(seconds, percent)) if seconds else float("nan")
