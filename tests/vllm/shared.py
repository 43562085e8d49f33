"""Servers that tests share: started when a test asks for them, stopped when one asks for others."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.testbed.conversation import Talking
from tests.vllm.testbed.pair import KvdPair
from tests.vllm.testbed.servers import Engine, RouterProcess, Server
from tests.vllm.testbed.service import Service, start_all, stop_all

OFFER_TTL = 12.0
"""Long enough for a busy machine, short enough to be waited for."""

TURN_TTL = 60.0
"""Of conversations: longer than a turn takes on a busy machine, short enough to be waited for."""

BLOCKS = 66
"""Of 32 tokens: room for one request of 2,000 tokens, and beside the shortest one for none as long."""

PULL_SECONDS = 600.0
"""Longer than any test waits: a request whose blocks do not come ends for what has happened to them."""

LOGGED_LINES = 40
"""Of each process, in the report of a test that failed."""

LOST_SOON = {"heartbeat": "5", "claim_ttl": "20"}
"""Daemons that die are missed within the patience of a request, and those that are only slow are not."""


class Compared:
    """A model on a pair, with a router before it, and on a server of its own."""

    def __init__(self, folder: Path, models: Path, model: str) -> None:
        self.pair = KvdPair(folder, models, model, extra={"offer_ttl": PULL_SECONDS, "pull_timeout": PULL_SECONDS})
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
        self.prefill.variables = {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache
        for daemon in self.daemons.values():
            daemon.settings = LOST_SOON


class Shared:
    """Runs one set of servers at a time. Whatever dies is missed by the next test, which gets a new set."""

    def __init__(self, models: Path, folders: pytest.TempPathFactory) -> None:
        self._models = models
        self._folders = folders
        self._sets: dict[str, Any] = {}
        """By name; one or none."""

    async def compared(self, model: str) -> Compared:
        made: Compared = await self._running(model, lambda folder: Compared(folder, self._models, model))
        return made

    async def mortal(self, policy: str) -> Mortal:
        made: Mortal = await self._running(policy, lambda folder: Mortal(folder, self._models, policy))
        return made

    async def talking(self, model: str) -> Talking:
        def make(folder: Path) -> Talking:
            made = Talking(folder, self._models, model, turn_ttl=TURN_TTL)
            for daemon in made.pair.daemons.values():
                daemon.settings = LOST_SOON
            return made

        talking: Talking = await self._running(f"talking-{model}", make)
        return talking

    async def _running(self, name: str, make: Callable[[Path], Any]) -> Any:
        wanted = self._sets.get(name)
        if wanted is None or not all(service.running for service in wanted.services):
            self.stop()
            self._sets[name] = wanted = make(self._folders.mktemp(name))
            await start_all(wanted.services)
        return wanted

    def logged(self) -> list[tuple[str, str]]:
        """For each process that has logged errors, or something of kvd, its name and the last lines of that."""
        found = []
        for service in (service for each in self._sets.values() for service in each.services):
            lines = service.log.read_text(errors="replace").splitlines() if service.log.exists() else []
            if told := [line for line in lines if re.search("kvd|error|warning", line, re.IGNORECASE)][-LOGGED_LINES:]:
                found.append((f"log of {service.name}", "\n".join(told)))
        return found

    def stop(self) -> None:
        """Ends what runs."""
        while self._sets:
            stop_all(self._sets.popitem()[1].services)
