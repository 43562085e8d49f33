import asyncio
import itertools
import random

import numpy as np
import pytest

from kvd.transport.interface import Region
from tests.conformance.contract import CHECKS, Contract
from tests.conformance.site import PRODUCED, Bytes, pattern
from tests.support.fake_fabric import FakeFabric
from tests.support.fake_transport import FakeTransport


class FakeProducer:
    def __init__(self, fabric: FakeFabric, agent: str, size: int, seed: int) -> None:
        self.agent, self.seed, self.size = agent, seed, size
        self._fabric = fabric
        self._transport = FakeTransport(agent, fabric)
        self._events: asyncio.Queue = asyncio.Queue()
        self._transport.start(self._events.put_nowait)
        self._pools = itertools.count()

    async def open(self) -> "FakeProducer":
        self.metadata, self.base = await self.register_more(self.size, self.seed)
        self.stamps = self.base
        return self

    async def register_more(self, size: int, seed: int) -> tuple[bytes, int]:
        base = self._fabric.map(pattern(seed, size))
        self._transport.register(next(self._pools), Region(base, size))
        return (await self._events.get()).metadata, base

    async def kill(self) -> None:
        self._fabric.kill(self.agent)


class FakeSite:
    device = ""

    def __init__(self, *, stamps: bool = False) -> None:
        self._fabric = FakeFabric(asyncio.get_running_loop(), random.Random(1), stamps=stamps)  # noqa: S311
        self._names = map("agent-{}".format, itertools.count())
        self._shared: FakeProducer | None = None

    def transport(self) -> FakeTransport:
        return FakeTransport(next(self._names), self._fabric)

    def memory(self, size: int) -> tuple[int, Bytes, int]:
        memory = np.zeros(size, np.uint8)
        return self._fabric.map(memory), memory, -1

    async def shared(self) -> FakeProducer:
        if self._shared is None:
            self._shared = await self.producer(PRODUCED, 5)
        return self._shared

    async def producer(self, size: int, seed: int) -> FakeProducer:
        return await FakeProducer(self._fabric, next(self._names), size, seed).open()


@pytest.mark.parametrize("stamps", [False, True])
@pytest.mark.parametrize("check", CHECKS)
async def test_the_fake_keeps_the_contract(check: str, stamps: bool) -> None:
    await Contract(FakeSite(stamps=stamps)).run(check)
