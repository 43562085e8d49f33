"""All runs on the loop of `kvd router`, and on asyncio's own, which differ in when they accept, write and close."""

import asyncio
from collections.abc import Callable, Mapping

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
