"""What the contract's checks need: what an implementation provides, and a reader that records its events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvd import limits
from kvd.plan import Descriptors
from kvd.transport.interface import (
    Event,
    Landed,
    PeerAdded,
    ReadFailed,
    ReadRequest,
    Region,
    Transport,
)
from tests.support.patience import MOMENT

Bytes = npt.NDArray[np.uint8]
E = TypeVar("E", bound=Event)

PRODUCED: Final = 256 * limits.MIB
"""Bytes of the shared producer's pool: more than may be in flight, so that tests can interfere in mid-read."""


@lru_cache(maxsize=4)
def pattern(seed: int, size: int) -> Bytes:
    """A producer's bytes, uint8 `[size]`, read-only. Their period is prime, so no two blocks are alike."""
    period = np.frombuffer(np.random.default_rng(seed).bytes(1_000_003), dtype=np.uint8)
    memory = np.empty(size, np.uint8)
    for start in range(0, size, len(period)):
        memory[start : start + len(period)] = period[: size - start]
    memory.flags.writeable = False
    return memory


class Producer(Protocol):
    """Another agent, running. Its pool at `base` holds `pattern(seed, size)`, as does its host memory at `stamps`."""

    agent: str
    metadata: bytes
    base: int
    stamps: int
    seed: int
    size: int

    async def register_more(self, size: int, seed: int) -> tuple[bytes, int]:
        """Registers another pool with that pattern; returns the new metadata and the new pool's base."""

    async def kill(self) -> None:
        """Ends the agent without a word to anyone, like kill -9."""


class Site(Protocol):
    """An implementation to check, with memory and peers for it. `device` is the GPU that has it; empty for the host."""

    device: str

    def transport(self) -> Transport:
        """A new one, not started, under a new name."""

    def memory(self, size: int) -> tuple[int, Bytes, int]:
        """Zeroed memory that a transport of this site can register: its base, its bytes, its descriptor or -1."""

    async def shared(self) -> Producer:
        """A producer of `PRODUCED` bytes that lives as long as the site."""

    async def producer(self, size: int, seed: int) -> Producer:
        """A new producer, for the caller to kill."""


def table(rows: Sequence[tuple[int, int, int]]) -> Descriptors:
    """Descriptors from rows of (source offset, destination offset, bytes)."""
    columns = np.array(rows, dtype=np.uint64).reshape(-1, 3)
    return Descriptors(columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy())


def blocks(first: int, count: int, size: int, step: int = 1) -> Descriptors:
    """Every `step`-th block of `size` bytes from block `first` on, to the same offsets."""
    return table([((first + i * step) * size, (first + i * step) * size, size) for i in range(count)])


def everything(times: int) -> Descriptors:
    """All of a shared producer's pool, so often that a busy machine, too, is still reading when a test interferes."""
    once = blocks(0, PRODUCED // (256 * limits.KIB), 256 * limits.KIB)
    return Descriptors(*(np.tile(column, times) for column in (once.src, once.dst, once.length)))


class Reader:
    """A transport that reads, with its events and its memory."""

    def __init__(self, transport: Transport, region: Region, memory: Bytes) -> None:
        self.transport = transport
        self.region = region
        self.memory = memory
        self.events: list[Event] = []
        self._changed = asyncio.Event()
        self._reads = 0

    def on_event(self, event: Event) -> None:
        """For `Transport.start`."""
        self.events.append(event)
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition on the events holds."""
        async with asyncio.timeout(MOMENT):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def answer(self, kind: type[E], count: int = 1) -> E:
        """The `count`-th event of a kind."""
        await self.until(lambda: len(self.of(kind)) >= count)
        return self.of(kind)[count - 1]

    def of(self, kind: type[E]) -> list[E]:
        """The events of a kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    def ends(self, read: int) -> list[Landed | ReadFailed]:
        """The ends of a read so far: at most one, if all is well."""
        return [event for event in self.events if isinstance(event, Landed | ReadFailed) and event.read == read]

    async def end(self, read: int) -> Landed | ReadFailed:
        """Waits for the end of a read."""
        await self.until(lambda: bool(self.ends(read)))
        return self.ends(read)[0]

    async def add(self, producer: Producer) -> None:
        """Adds a producer and waits for the answer."""
        count = len(self.of(PeerAdded)) + 1
        self.transport.add_peer(producer.agent, producer.metadata)
        added = await self.answer(PeerAdded, count)
        assert (added.agent, added.metadata) == (producer.agent, producer.metadata)

    def read(
        self,
        producer: Producer,
        descriptors: Descriptors,
        remote_base: int | None = None,
        *,
        stamp: int = 0,
        expected: int = 0,
    ) -> int:
        """Starts a read; returns its number."""
        self._reads += 1
        base = producer.base if remote_base is None else remote_base
        self.transport.read(
            ReadRequest(self._reads, producer.agent, self.region.base, base, descriptors, stamp, expected)
        )
        return self._reads

    async def first_byte(self, contents: Bytes) -> None:
        """Waits until something of the first block has landed."""
        async with asyncio.timeout(MOMENT):
            while not np.array_equal(self.memory[:64], contents[:64]):  # noqa: ASYNC110 - only the bytes tell
                await asyncio.sleep(0)

    async def still_well(self, producer: Producer) -> None:
        """Reads one block, to show that the transport lives."""
        self.memory[: 4 * limits.KIB] = 0
        end = await self.end(self.read(producer, blocks(0, 1, 4 * limits.KIB)))
        assert isinstance(end, Landed), end
        assert np.array_equal(self.memory[: 4 * limits.KIB], pattern(producer.seed, 4 * limits.KIB))
