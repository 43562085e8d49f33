"""The servers that tests of vLLM share."""

from pathlib import Path

from tests.serving.shared import LOST_SOON, SharedSets
from tests.vllm.testbed.conversation import Talking
from tests.vllm.testbed.pair import KvdPair
from tests.vllm.testbed.servers import Engine, RouterProcess, Server
from tests.vllm.testbed.service import Service

OFFER_TTL = 12.0
"""Long enough for a busy machine, short enough to be waited for."""

TURN_TTL = 60.0
"""Of conversations: longer than a turn takes on a busy machine, short enough to be waited for."""

BLOCKS = 66
"""Of 32 tokens: room for one request of 2,000 tokens, and beside the shortest one for none as long."""

PULL_SECONDS = 600.0
"""Longer than any test waits: a request whose blocks do not come ends for what has happened to them."""

CHUNKS = ("--max-num-batched-tokens", "512")
"""Prefills are computed in chunks of so many tokens."""


class Compared:
    """A model on a pair, with a router before it, and on a server of its own."""

    def __init__(self, folder: Path, models: Path, model: str) -> None:
        self.pair = KvdPair(folder, models, model, extra={"offer_ttl": PULL_SECONDS, "pull_timeout": PULL_SECONDS})
        self.pair.prefill.flags = CHUNKS
        self.single = Server("single", folder, Engine(models, model))
        self.router = RouterProcess(folder, self.pair.prefill, self.pair.decode)

    @property
    def services(self) -> list[Service]:
        return [*self.pair.services, self.single, self.router]


class Mortal(KvdPair):
    """A pair whose processes may be killed. 400 tokens are 50 MB with this model, so that deaths find them moving."""

    def __init__(self, folder: Path, models: Path, policy: str) -> None:
        extra = {"offer_ttl": OFFER_TTL, "pull_timeout": PULL_SECONDS}
        super().__init__(folder, models, "bench", policy=policy, blocks=BLOCKS, extra=extra)
        self.prefill.flags = CHUNKS
        for server in (self.prefill, self.decode):
            server.variables = {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache, /sleep and /pause
        for daemon in self.daemons.values():
            daemon.settings = LOST_SOON


class Shared(SharedSets):
    """Those sets, by what a test needs."""

    async def compared(self, model: str) -> Compared:
        return await self.running(model, lambda folder: Compared(folder, self.models, model))

    async def mortal(self, policy: str) -> Mortal:
        return await self.running(policy, lambda folder: Mortal(folder, self.models, policy))

    async def talking(self, model: str) -> Talking:
        def make(folder: Path) -> Talking:
            made = Talking(folder, self.models, model, turn_ttl=TURN_TTL)
            for daemon in made.pair.daemons.values():
                daemon.settings = LOST_SOON
            return made

        return await self.running(f"talking-{model}", make)
