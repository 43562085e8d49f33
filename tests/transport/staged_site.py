"""Pools on a GPU that others read by way of windows, over the fake fabric: the GPU's memory is memory of it, too."""

import asyncio
import itertools
import random

import numpy as np

from kvd import limits
from kvd.errors import DeviceError, ErrorCode, KvdError
from kvd.transport.interface import Region
from kvd.transport.staged.arena import Buffers
from kvd.transport.staged.transport import StagedTransport
from tests.conformance.site import PRODUCED, Bytes, pattern
from tests.support.fake_fabric import FakeFabric
from tests.support.fake_transport import FakeTransport


class FakeMemory:
    """Memory of the fabric (a `kvd.transport.staged.arena.HostMemory`)."""

    def __init__(self, fabric: FakeFabric, size: int, *, hidden: bool = False) -> None:
        self._fabric = fabric
        self.content = np.zeros(size, np.uint8)
        self.region = Region(fabric.map(self.content), size, length=size, hidden=hidden)

    def free(self) -> None:
        self._fabric.unmap(self.region.base)


class FakeGpu:
    """Copies between addresses of the fabric, a turn of the loop later; while it is `held`, not at all.

    `arenas` are the addresses of the memory that it has made and not freed.
    """

    def __init__(self, fabric: FakeFabric) -> None:
        self._fabric = fabric
        self.held = False
        self.failure: DeviceError | None = None
        self.shortage: KvdError | None = None
        self.copies = 0
        self.arenas: list[int] = []
        self._waiting: list = []

    def allocate(self, size, done) -> None:
        self._fabric.loop.call_soon(self._allocate, size, done)

    def _allocate(self, size, done) -> None:
        if self.shortage is not None:
            done(self.shortage)
            return
        memory = FakeMemory(self._fabric, size)
        self.arenas.append(memory.region.base)
        done(memory)

    def free(self, memory) -> None:
        self.arenas.remove(memory.region.base)
        memory.free()

    def copy(self, targets, sources, lengths, done) -> None:
        self._waiting.append((targets, sources, lengths, done))
        self._fabric.loop.call_soon(self.work)

    def work(self) -> None:
        while self._waiting and not self.held:
            targets, sources, lengths, done = self._waiting.pop(0)
            if self.failure is None:
                for target, source, length in zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True):
                    self._fabric.view(target, length)[:] = self._fabric.view(source, length)
                    self.copies += 1
            done(self.failure)

    def break_down(self, *, lost: bool = False) -> None:
        self.failure = DeviceError(ErrorCode.NO_DEVICE, "the copy failed", "CUDA_ERROR_UNKNOWN", lost=lost)

    def close(self) -> None:
        self._waiting.clear()


class End:
    """One agent: `gpu` if its pools are on one."""

    def __init__(self, fabric: FakeFabric, agent: str, *, on_gpu: bool) -> None:
        slots = limits.STAGING_SLOTS if on_gpu else 0
        self.buffers = Buffers(FakeMemory(fabric, Buffers.size(slots), hidden=True), slots)
        self.gpu = FakeGpu(fabric) if on_gpu else None
        self.network = FakeTransport(agent, fabric)
        self.transport = StagedTransport(self.network, self.buffers, self.gpu, fabric.loop)

    def region(self, base: int, size: int) -> Region:
        return Region(base, size, device="GPU-fake" if self.gpu else "")

    def arena_of(self, pool: int):
        return self.transport._served._pools[pool].arena

    def windows_of(self, pool: int):
        return self.transport._served._pools[pool].server._windows


class Producer:
    def __init__(self, fabric: FakeFabric, agent: str, size: int, seed: int, *, on_gpu: bool) -> None:
        self.agent, self.seed, self.size = agent, seed, size
        self._fabric = fabric
        self.end = End(fabric, agent, on_gpu=on_gpu)
        self.events: asyncio.Queue = asyncio.Queue()
        self.end.transport.start(self.events.put_nowait)
        self._pools = itertools.count(1)

    async def open(self) -> "Producer":
        await asyncio.sleep(0.001)  # its buffers are registered
        self.metadata, self.base = await self.register_more(self.size, self.seed)
        self.stamps = self.base
        return self

    async def register_more(self, size: int, seed: int) -> tuple[bytes, int]:
        base = self._fabric.map(pattern(seed, size))
        self.end.transport.register(next(self._pools), self.end.region(base, size))
        return (await self.events.get()).metadata, base

    async def kill(self) -> None:
        self._fabric.kill(self.agent)


class DeviceReader:
    """A transport whose pools are registered as a GPU's, whatever the contract says of them."""

    def __init__(self, end: End) -> None:
        self._end = end

    def register(self, pool: int, region: Region) -> None:
        self._end.transport.register(pool, self._end.region(region.base, region.size))

    def __getattr__(self, name: str):
        return getattr(self._end.transport, name)


class StagedSite:
    """`source` and `target` say whether the pools of producers and readers are on a GPU."""

    device = ""

    def __init__(self, *, source: bool, target: bool) -> None:
        self.fabric = FakeFabric(asyncio.get_running_loop(), random.Random(1))  # noqa: S311
        self._names = map("agent-{}".format, itertools.count())
        self._source, self._target = source, target
        self._shared: Producer | None = None

    def transport(self) -> DeviceReader:
        return DeviceReader(End(self.fabric, next(self._names), on_gpu=self._target))

    def memory(self, size: int) -> tuple[int, Bytes, int]:
        memory = np.zeros(size, np.uint8)
        return self.fabric.map(memory), memory, -1

    async def shared(self) -> Producer:
        if self._shared is None:
            self._shared = await self.producer(PRODUCED, 5)
        return self._shared

    async def producer(self, size: int, seed: int) -> Producer:
        return await Producer(self.fabric, next(self._names), size, seed, on_gpu=self._source).open()
