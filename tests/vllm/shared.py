"""The servers that tests of vLLM share."""

from pathlib import Path

from tests.serving.shared import LOST_SOON, SharedSets
from tests.vllm.testbed import servers
from tests.vllm.testbed.conversation import Talking
from tests.vllm.testbed.pair import KvdPair

OFFER_TTL = 12.0
"""Long enough for a busy machine, short enough to be waited for."""

TURN_TTL = 25.0
"""Of conversations: longer than the next turn takes to come on a busy machine, short enough to be waited for."""

BLOCKS = 66
"""Of 32 tokens: room for one request of 2,000 tokens, and beside the shortest one for none as long."""

PULL_SECONDS = 600.0
"""Longer than any test waits: a request whose blocks do not come ends for what has happened to them."""

CHUNKS = ("--max-num-batched-tokens", "512")
"""Prefills are computed in chunks of so many tokens."""


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

    async def compared(self, model: str) -> Talking:
        """A model on a pair, with a router before it, and on a server of its own."""

        def make(folder: Path) -> Talking:
            extra = {"offer_ttl": PULL_SECONDS, "pull_timeout": PULL_SECONDS, "turn_ttl": TURN_TTL}
            made = Talking(folder, self.models, model, blocks=2 * servers.BLOCKS, **extra)
            made.pair.prefill.flags = (*made.pair.prefill.flags, *CHUNKS)
            for daemon in made.pair.daemons.values():
                daemon.settings = LOST_SOON
            return made

        return await self.running(model, make)

    async def mortal(self, policy: str) -> Mortal:
        return await self.running(policy, lambda folder: Mortal(folder, self.models, policy))
