"""Servers that tests share: started when a test asks for them, stopped when one asks for others or has failed."""

import contextlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

from tests.vllm.testbed.service import Service, start_all, stop_all

LOGGED_LINES = 40
"""Of each process, in the report of a test that failed."""

LOST_SOON = {"heartbeat": "5", "claim_ttl": "20"}
"""Daemons that die are missed within the patience of a request, and those that are only slow are not."""

TEST_SECONDS = 900
"""The first test of a module starts three servers: two minutes where the machine has other work."""


class ServerSet(Protocol):
    """Servers that belong together."""

    @property
    def services(self) -> Sequence[Service]:
        """All of them, in the order in which they start."""


_Set = TypeVar("_Set", bound=ServerSet)
_Shared = TypeVar("_Shared", bound="SharedSets")


class SharedSets:
    """Runs one set of servers at a time. Whatever dies is missed by the next test, which gets a new set."""

    def __init__(self, models: Path, folders: pytest.TempPathFactory) -> None:
        self.models = models
        self._folders = folders
        self._sets: dict[str, ServerSet] = {}
        """By name; one or none."""

    async def running(self, name: str, make: Callable[[Path], _Set]) -> _Set:
        """The set of this name, which `make` makes in a folder of its own unless it runs."""
        found = self._sets.get(name)
        if found is not None and all(service.running for service in found.services):
            return found  # type: ignore[return-value]
        self.stop()
        self._sets[name] = made = make(self._folders.mktemp(name))
        await start_all(made.services)
        return made

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


@contextlib.contextmanager
def stopped_in_the_end(shared: _Shared) -> Iterator[_Shared]:
    """The servers, all of which have ended when the context is left."""
    try:
        yield shared
    finally:
        shared.stop()


def mark_real(item: pytest.Item, package: str, setup: str) -> None:
    """Marks a test that starts servers of `package`, which `setup` installs."""
    found = importlib.util.find_spec(package)
    installed = found is not None and found.origin is not None  # a folder of that name could pass for a package
    item.add_marker(pytest.mark.real)
    item.add_marker(pytest.mark.timeout(TEST_SECONDS))
    if not installed:
        item.add_marker(pytest.mark.skip(reason=f"needs {package}: {setup}"))


def report_and_replace(item: pytest.Item, report: pytest.TestReport) -> pytest.TestReport:
    """After a test that failed, its report has what the servers logged of it, and the next one gets other servers."""
    shared = getattr(item, "funcargs", {}).get("shared")
    if report.failed and shared is not None:
        report.sections += shared.logged()
        shared.stop()
    return report
