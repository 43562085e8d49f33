import asyncio
import ctypes
import itertools
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd.memory.provider import provider_for
from kvd.transport.interface import Region, Transport
from kvd.transport.routed import RoutedTransport
from kvd.transport.samehost.transport import SameHostTransport
from tests.conformance.contract import CHECKS, Contract
from tests.conformance.site import PRODUCED, Bytes, pattern

pytestmark = pytest.mark.real

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.transport.test_samehost"])


def transport_at(path: str, agent: str, device: str) -> Transport:
    loop = asyncio.get_running_loop()
    same_host = SameHostTransport(agent, loop, f"{path}.pools", host="this", threads=2, device=device)
    return RoutedTransport(same_host, None)


async def produce(path: str, agent: str, memory: str, pipe: Connection) -> None:
    """Exports pools in `memory` as the pipe asks, and exits when the pipe is closed."""
    provider = provider_for(memory)
    transport = transport_at(path, agent, provider.device)
    events: asyncio.Queue = asyncio.Queue()
    transport.start(events.put_nowait)
    kept = []
    for number in itertools.count():
        try:
            size, seed = await asyncio.to_thread(pipe.recv)
        except EOFError:
            os._exit(0)
        pool, content = provider.allocate("pool", size), pattern(seed, size)
        kept.append((pool, content))
        if pool.device:
            pool._mapping.write(0, content.tobytes())
        else:
            os.pwrite(pool.descriptor, content.tobytes(), 0)
        transport.register(number, Region(pool.base, size, pool.descriptor, pool.device, pool.length))
        pipe.send(((await events.get()).metadata, pool.base, content.ctypes.data))


def run_producer(path: str, agent: str, memory: str, pipe: Connection) -> None:
    asyncio.run(produce(path, agent, memory, pipe))


class SameHostProducer:
    def __init__(self, path: str, agent: str, memory: str, size: int, seed: int) -> None:
        self.agent, self.size, self.seed = agent, size, seed
        self._pipe, theirs = FORKSERVER.Pipe()
        self._process = FORKSERVER.Process(target=run_producer, args=(path, agent, memory, theirs), daemon=True)
        self._process.start()
        theirs.close()

    async def open(self) -> "SameHostProducer":
        self.metadata, self.base, self.stamps = await self._register(self.size, self.seed)
        return self

    async def register_more(self, size: int, seed: int) -> tuple[bytes, int]:
        metadata, base, _ = await self._register(size, seed)
        return metadata, base

    async def _register(self, size: int, seed: int) -> tuple[bytes, int, int]:
        self._pipe.send((size, seed))
        return await asyncio.to_thread(self._pipe.recv)

    async def kill(self) -> None:
        self.end()

    def end(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()
        self._pipe.close()


class SameHostSite:
    """Pools in `memory`: "cpu", or "cuda:N"."""

    def __init__(self, folder: Path, memory: str = "cpu") -> None:
        self._memory = memory
        self._names = map("agent-{}".format, itertools.count())
        self._folder = folder
        self.kept: SameHostProducer | None = None
        provider = provider_for(memory)
        self.device = provider.device
        self._pools = provider.allocate("small", PRODUCED // 2), provider.allocate("large", PRODUCED)

    def close(self) -> None:
        for pool in self._pools:
            pool.close()
        if self.kept is not None:
            self.kept.end()

    def transport(self) -> Transport:
        name = next(self._names)
        return transport_at(str(self._folder / name), name, self.device)

    def memory(self, size: int) -> tuple[int, Bytes, int]:
        pool = self.pool_for(size)
        memory = np.frombuffer((ctypes.c_char * size).from_address(pool.base), np.uint8)
        memory[:] = 0
        return pool.base, memory, pool.descriptor

    def pool_for(self, size: int) -> Any:
        return self._pools[size > PRODUCED // 2]

    async def shared(self) -> SameHostProducer:
        if self.kept is None:
            self.kept = await self.producer(PRODUCED, 5)
        return self.kept

    async def producer(self, size: int, seed: int) -> SameHostProducer:
        name = next(self._names)
        return await SameHostProducer(str(self._folder / name), name, self._memory, size, seed).open()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SameHostSite]:
    site = SameHostSite(tmp_path_factory.mktemp("samehost"))
    yield site
    site.close()


@pytest.mark.parametrize("check", CHECKS)
async def test_copies_within_the_host_keep_the_contract(site: SameHostSite, check: str) -> None:
    await Contract(site).run(check)
