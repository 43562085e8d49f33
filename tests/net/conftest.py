"""Both loops that kvd runs on, a driver that waits for events and never sleeps, and a check that nothing is left."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd.net.interface import PeerAsked
from tests.support.closing import wait_until_closed
from tests.support.loops import UvLoop
from tests.support.patience import MOMENT

HERE = Path(__file__).parent


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": UvLoop}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is asynchronous here is the daemon's, which runs on uvloop: the other half runs in `make test-all` only.

    Of this room a client uses frames, options and `FrameStream` (`kvd/client/connection.py`), which know no loop; how
    it fares on either is for tests/client, and an exporter on asyncio's for tests/transport.
    """
    for item in items:
        variant = getattr(item, "callspec", None)
        if HERE in item.path.parents and variant and asyncio.new_event_loop in variant.params.values():
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _nothing_left_behind(tmp_path: Path) -> Iterator[None]:
    before = threading.enumerate()
    yield
    wait_until_closed()
    assert sorted(os.listdir(tmp_path)) == []
    assert [thread.name for thread in threading.enumerate() if thread not in before] == []
    sockets = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            continue
        if str(tmp_path) in target:
            sockets.append(target)
    assert sockets == []


class Inbox:
    """Collects events; `until` waits for a condition on all of them."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self._arrived = asyncio.Event()

    def __call__(self, event: Any) -> None:
        self.events.append(event)
        self._arrived.set()

    async def until(self, condition: Callable[[list[Any]], bool]) -> None:
        async with asyncio.timeout(MOMENT):
            while not condition(self.events):
                self._arrived.clear()
                await self._arrived.wait()

    async def next(self, kind: type) -> Any:
        """Removes and returns the first event of `kind`, waiting for it."""
        await self.until(lambda events: any(isinstance(event, kind) for event in events))
        index = next(i for i, event in enumerate(self.events) if isinstance(event, kind))
        return self.events.pop(index)


def without_token(asked: PeerAsked) -> PeerAsked:
    """As if the routing id of its link were the daemon's agent alone."""
    return PeerAsked(asked.sender.rpartition(b"#")[0], asked.frame, asked.key)


@pytest.fixture
async def inbox() -> Inbox:
    return Inbox()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(MOMENT):
        while not condition():  # noqa: ASYNC110 - nobody is told of what is waited for
            await asyncio.sleep(0.01)
