"""All runs on the loop of `kvd router`, and on asyncio's own, which differ in when they accept, write and close."""

import asyncio
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import pytest

from kvd.router import limits
from tests.support.loops import UvLoop
from tests.support.patience import MOMENT


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": UvLoop, "asyncio": asyncio.new_event_loop}


@pytest.fixture(autouse=True)
def _no_server_is_lost_to_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONNECT_SECONDS", "PROBE_SECONDS"):
        monkeypatch.setattr(limits, name, MOMENT)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """By which servers that failed rest: it stands, and the test sets it forward by its `now`."""
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    for module in ("attempts", "route"):
        monkeypatch.setattr(f"kvd.router.{module}.time", clock)
    return clock
