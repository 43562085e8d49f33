"""Servers that tests share: started when a test asks for them, stopped when one asks for others or has failed."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.testbed.pair import KvdPair
from tests.sglang.testbed.servers import Engine, Server
from tests.vllm.testbed.service import Service, start_all, stop_all

LOGGED_LINES = 40
"""Of each process, in the report of a test that failed."""

LOST_SOON = {"heartbeat": "5", "claim_ttl": "20"}
"""Daemons that die are missed within the patience of a request, and those that are only slow are not."""


class Compared:
    """A model on a pair, and on a server of its own."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.pair = KvdPair(folder, engine)
        self.single = Server("single", folder, engine)

    @property
    def services(self) -> list[Service]:
        return [*self.pair.services, self.single]


class Mortal(Compared):
    """The same; its processes may be killed."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        super().__init__(folder, engine)
        for daemon in self.pair.daemons.values():
            daemon.settings = LOST_SOON


class Shared:
    """Runs one set of servers at a time. Whatever dies is missed by the next test, which gets a new set."""

    def __init__(self, models: Path, folders: pytest.TempPathFactory) -> None:
        self._models = models
        self._folders = folders
        self._sets: dict[str, Any] = {}
        """By name; one or none."""

    async def compared(self, model: str) -> Compared:
        made: Compared = await self._running(f"compared-{model}", model, Compared)
        return made

    async def mortal(self) -> Mortal:
        made: Mortal = await self._running("mortal", "llama", Mortal)
        return made

    async def _running(self, name: str, model: str, make: Callable[[Path, Engine], Any]) -> Any:
        wanted = self._sets.get(name)
        if wanted is None or not all(service.running for service in wanted.services):
            self.stop()
            self._sets[name] = wanted = make(self._folders.mktemp(name), Engine(self._models, model))
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
