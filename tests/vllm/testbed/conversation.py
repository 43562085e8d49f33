"""A conversation with a pair behind a router, turn by turn, and what each turn cost its prefill server."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.vllm.testbed.catalog import make_prompt
from tests.vllm.testbed.client import Completion, complete, make_body
from tests.vllm.testbed.pair import KvdPair
from tests.vllm.testbed.servers import BLOCKS, Engine, RouterProcess, Server, scrape
from tests.vllm.testbed.service import Service
from tests.vllm.waiting import until

LONGER = ("--max-model-len", "4096")
"""Tokens of five turns; models here have as many positions."""

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"

ASKED, ANSWERED = 200, 400
"""Tokens of a user's message and of an answer, in a turn of 600."""

OUTCOMES = ("pulled", "gone", "differs", "cached", "policy")
"""What may become of a turn at the prefill server."""


class Talking:
    """A pair with a router before it, and a server of its own to compare with; `extra` are the connector's settings."""

    def __init__(self, folder: Path, models: Path, model: str, *, blocks: int = BLOCKS, **extra: float) -> None:
        self.model = model
        self.pair = KvdPair(folder, models, model, blocks=blocks, extra={"turn_share": 0.5, **extra})
        self.single = Server("single", folder, Engine(models, model, blocks))
        self.router = RouterProcess(folder, self.pair.prefill, self.pair.decode)
        for server in (self.pair.prefill, self.pair.decode, self.single):
            server.flags = (*LONGER, "--chat-template", TEMPLATE)
        self.answered = 0
        """Turns that the router has answered."""
        self._lost = 0.0
        """Those of them that were not kept, as far as `asked` has told."""

    @property
    def services(self) -> list[Service]:
        return [*self.pair.services, self.single, self.router]

    async def prefilled(self) -> dict[str, float]:
        """Tokens of prompts that the prefill server has scheduled, by where it has them from; and turns, by outcome.

        As its scheduler counts. Its front end counts no request that the router closed: one that both servers got at
        once may be answered by the decode server before the prefill server's own answer is under way.
        """
        metrics = await scrape(self.pair.prefill)
        prompts, cached = (metrics.total(f"vllm:prefix_cache_{name}_total") for name in ("queries", "hits"))
        pulled = metrics.total("vllm:external_prefix_cache_hits_total")
        outcomes = {name: metrics.total("vllm:kvd_turns_total", outcome=name) for name in OUTCOMES}
        return outcomes | {"prompts": prompts, "tokens_pulled": pulled, "computed": prompts - cached - pulled}

    async def prefilled_since(self, before: dict[str, float], tokens: int, turns: int) -> dict[str, float]:
        """What was counted since `before`, once prompts of so many tokens are, and what became of so many turns."""
        counted: dict[str, float] = {}

        async def are() -> bool:
            nonlocal counted
            after = await self.prefilled()
            counted = {name: after[name] - before[name] for name in after}
            return counted["prompts"] >= tokens and sum(counted[outcome] for outcome in OUTCOMES) >= turns

        await until(are)
        return counted

    async def turns(self, outcome: str) -> float:
        """What the router counted."""
        return (await scrape(self.router)).total("kvd_router_turns_total", outcome=outcome)

    async def early(self) -> float:
        """Requests that both servers got at once, and that went well so."""
        return (await scrape(self.router)).total("kvd_router_early_total", outcome="done")

    async def asked(self) -> None:
        """Waits until the router has asked the decode server for what it keeps of each turn so far, which is all."""

        async def has() -> bool:
            return await self.turns("kept") + await self.turns("not_kept") >= self.answered

        await until(has)
        lost, self._lost = self._lost, await self.turns("not_kept")
        assert self._lost == lost, f"the decode server keeps nothing of {self._lost - lost:.0f} turns"


@dataclass
class Conversation:
    """One of `talking`, called `name`, through its router or another one; equal seeds ask the same."""

    talking: Talking
    name: str
    seed: int
    tokens: list[int] = field(default_factory=list)
    """Of all prompts and answers so far."""
    router: RouterProcess | None = None

    def body(self, answered: int = ANSWERED, asked: int = ASKED) -> dict[str, Any]:
        """The next turn's."""
        self.tokens += make_prompt(asked, seed=self.seed * 100 + len(self.tokens))
        return make_body(self.talking.model, list(self.tokens), answered, cache_salt=self.name)

    async def turn(self, body: dict[str, Any]) -> Completion:
        """Asks the router. The next turn goes on from the answer."""
        router = self.router or self.talking.router
        got = await complete(router.url, body, headers={"X-Conversation-Id": self.name})
        self.talking.answered += router is self.talking.router
        self.tokens += got.tokens
        return got
