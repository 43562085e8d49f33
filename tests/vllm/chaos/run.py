"""A pair under load while its processes die and stand still; what must hold all the same.

No request gets a wrong token, and none ends after its deadline. When the last fault of a round is over, which is when
the process that died is up again, everything works within `recovery` seconds: blocks move, and every request that
begins from then on gets its tokens. In the end nothing is held for requests that are gone.
"""

import asyncio
import contextlib
import functools
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.vllm.groups import place
from kvd.processes import ProcessEndedError
from tests.vllm.chaos.clients import MIX_UP, Clients, Outcome, Request
from tests.vllm.chaos.faults import Fault, Round, draw
from tests.vllm.held import nothing_is_held
from tests.vllm.testbed.catalog import make_prompt
from tests.vllm.testbed.client import Completion, complete, make_body, prefill
from tests.vllm.testbed.http import HttpError
from tests.vllm.testbed.pair import KvdPair
from tests.vllm.testbed.servers import RouterProcess, scrape
from tests.vllm.testbed.service import Service, start_all, stop_all
from tests.vllm.waiting import until

MODEL = "bench"
BLOCKS = 160
"""Of 32 tokens: for the requests in flight, and for offers of which nobody hears again until their time is over."""

WIDTH = 4
"""Requests in flight."""

TOKENS = 6
LENGTHS = (600, 40, 257, 430, 96, 512)
"""Tokens of prompts, in which and between which blocks end; the longest moves 79 MB."""

OFFER_TTL = 8.0
PULL_TIMEOUT = 20.0

PROBE_SECONDS = 0.2
GIVE_UP_SECONDS = 120.0
"""What does not work again by then never does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What must hold, in seconds."""

    deadline: float = 60.0
    """Of a request: three processes suspended one after the other, each for as long as it gets, and a pull's time."""
    recovery: float = 10.0
    """From the end of a round's last fault until everything works."""


@dataclass(slots=True)
class Verdict:
    """What happened; `broken` says what must not have."""

    rounds: int = 0
    faults: int = 0
    outcomes: dict[Outcome, int] = field(default_factory=dict)
    recoveries: list[float] = field(default_factory=list)
    """Seconds, of each round."""
    broken: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run: rounds begin for so many `seconds`."""

    seed: int
    seconds: float
    policy: str = "recompute"
    """What becomes of a request whose blocks do not come (`kv_load_failure_policy`)."""
    groups: str = "session"
    """Of `benchmarks.vllm.groups.GROUPS`."""
    router: bool = False
    """Whether `kvd router` stands before the pair, and is among the victims."""
    bounds: Bounds = Bounds()
    settings: Mapping[str, str] = field(default_factory=dict)
    """Of the daemons."""


async def run(plan: Plan, folder: Path, models: Path, say: Callable[[str], None]) -> Verdict:
    """Starts the processes, whose logs are in `folder`, and does to them what `plan` says.

    `say` gets two lines of each round.

    Raises:
        BadRequest: `BAD_CONFIG`, there can be no such groups.
        HttpError: The decode server does not answer, before anything was done to it.
        ProcessEndedError: A process did not start.
        TimeoutError: The same.

    """
    pair = KvdPair(
        folder,
        models,
        MODEL,
        policy=plan.policy,
        blocks=BLOCKS,
        extra={"offer_ttl": OFFER_TTL, "pull_timeout": PULL_TIMEOUT},
    )
    for daemon in pair.daemons.values():
        daemon.settings = dict(plan.settings)
    router = RouterProcess(folder, pair.prefill, pair.decode) if plan.router else None
    services = [*pair.services, *([router] if router else [])]
    with contextlib.ExitStack() as stack:
        place(plan.groups, pair, stack)
        stack.callback(stop_all, services)
        await start_all(services)
        chaos = _Chaos(pair, router, plan.bounds, say)
        return await chaos.run(draw(plan.seed, tuple(chaos.victims)), plan.seconds, plan.seed)


class _Chaos:
    """Faults on the processes of `pair`, and of the `router` before it if there is one. All of them run."""

    def __init__(self, pair: KvdPair, router: RouterProcess | None, bounds: Bounds, say: Callable[[str], None]) -> None:
        self._pair = pair
        self._router = router
        self._bounds = bounds
        self._say = say
        self._troubled: list[tuple[float, float]] = []
        """From the beginning of each round until everything worked again."""
        self._lacking = ""
        """Why not everything worked when it was looked at last."""
        self.verdict = Verdict()

    @property
    def victims(self) -> Mapping[str, Service]:
        """The processes by the names that faults have for them."""
        named: dict[str, Service] = {f"{side} daemon": daemon for side, daemon in self._pair.daemons.items()}
        named |= {"prefill server": self._pair.prefill, "decode server": self._pair.decode}
        return named | ({"router": self._router} if self._router else {})

    async def run(self, rounds: Iterator[Round], seconds: float, seed: int) -> Verdict:
        """Rounds until `seconds` are over."""
        known = await self._known()
        mix_up = 0.0 if self._router else MIX_UP
        clients = Clients(self._ask, known, width=WIDTH, deadline=self._bounds.deadline, seed=seed, mix_up=mix_up)
        start = time.monotonic()
        try:
            async with clients.running():
                await until(functools.partial(self._works, clients), seconds=GIVE_UP_SECONDS)
                while (now := time.monotonic() - start) < seconds:
                    await self._round(f"{now:6.1f} s, round {self.verdict.rounds + 1}", next(rounds), clients)
            await nothing_is_held(self._pair)
        except (HttpError, ProcessEndedError, TimeoutError) as error:
            self.verdict.broken.append(f"{type(error).__name__}: {error}")
        self._judge(clients.ended)
        return self.verdict

    # --- requests ---------------------------------------------------------------------------------------------------

    async def _ask(self, prompt: list[int], tokens: int, salt: str, mixed_up: bool) -> Completion:
        body = make_body(self._pair.prefill.engine.model, prompt, tokens, cache_salt=salt)
        if self._router is not None:
            return await complete(self._router.url, body)
        params = await prefill(self._pair.prefill.url, body)
        if mixed_up:  # by the router that these clients are
            params["kvd_prompt"] ^= 1
        return await complete(self._pair.decode.url, body | {"kv_transfer_params": params})

    async def _known(self) -> Sequence[tuple[list[int], Completion]]:
        """Prompts, and what the decode server makes of them when it computes everything itself."""
        prompts = [make_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
        alone = functools.partial(make_body, self._pair.decode.engine.model, cache_salt="alone")
        return [(prompt, await complete(self._pair.decode.url, alone(prompt, TOKENS))) for prompt in prompts]

    # --- faults -----------------------------------------------------------------------------------------------------

    async def _round(self, name: str, drawn: Round, clients: Clients) -> None:
        began = time.monotonic()
        self._troubled.append((began, math.inf))
        self._say(f"{name}: {'; '.join(map(str, drawn.faults))}")
        await asyncio.gather(*map(self._inflict, drawn.faults))
        over = time.monotonic()
        await until(functools.partial(self._works, clients), seconds=GIVE_UP_SECONDS, every=PROBE_SECONDS)
        worked = time.monotonic()
        self._troubled[-1] = began, worked
        self.verdict.rounds += 1
        self.verdict.faults += len(drawn.faults)
        self.verdict.recoveries.append(worked - over)
        self._say(f"          over after {over - began:.1f} s, all works {worked - over:.1f} s later")
        if worked - over > self._bounds.recovery:
            late = f"{name}: all works {worked - over:.1f} s after the last fault"
            self.verdict.broken.append(f"{late}; before that, {self._lacking}")
        await asyncio.sleep(drawn.calm)

    async def _inflict(self, fault: Fault) -> None:
        victim = self.victims[fault.victim]
        await asyncio.sleep(fault.after)
        if fault.kind == "suspend":
            victim.signal_group(signal.SIGSTOP)
            await asyncio.sleep(fault.lasts)
            victim.signal_group(signal.SIGCONT)
            return
        victim.signal(signal.SIGKILL)
        await asyncio.to_thread(victim.stop)  # a process may take seconds to die
        await asyncio.sleep(fault.lasts)
        victim.start()
        await victim.ready()

    async def _works(self, clients: Clients) -> bool:
        """Whether a request gets its tokens, and meanwhile blocks are loaded and no load fails."""
        for service in self.victims.values():
            if not service.running:
                await service.ready()  # raises, with the end of its log
        try:
            done, failed = await self._loads()
            asked = await clients.request()
            done_then, failed_then = await self._loads()
        except HttpError as error:
            self._lacking = str(error)
            return False
        works = asked.outcome is Outcome.RIGHT and done_then > done and failed_then == failed
        if not works:
            loads = f"{done_then - done:.0f} loads and {failed_then - failed:.0f} that failed"
            self._lacking = f"a request took {asked.ended - asked.began:.1f} s ({asked.outcome}), beside {loads}"
        return works

    async def _loads(self) -> tuple[float, float]:
        """Pulls of the decode side that ended well, and badly: as its daemon has it."""
        metrics = await scrape(self._pair.daemons["decode"])
        return metrics.total("kvd_pulls_total", outcome="done"), metrics.total("kvd_pull_failures_total")

    # --- what must hold ---------------------------------------------------------------------------------------------

    def _judge(self, ended: Sequence[Request]) -> None:
        verdict = self.verdict
        verdict.outcomes = {outcome: sum(one.outcome is outcome for one in ended) for outcome in Outcome}
        for one in ended:
            if one.outcome in {Outcome.WRONG, Outcome.LATE}:
                verdict.broken.append(f"a request was {one.outcome}: {one.said}")
            elif one.outcome is Outcome.FAILED and not any(
                one.began < worked and began < one.ended for began, worked in self._troubled
            ):
                verdict.broken.append(f"a request failed where nothing was amiss: {one.said}")
