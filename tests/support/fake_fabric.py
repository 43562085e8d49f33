"""The world of the fake transports: memory, network, clock and faults, all in one process.

One `FakeFabric` is what all agents of a run share. Bytes of a slice land in `STEPS` steps, each taken from the source
at its own moment, so a producer that overwrites a block in the middle of a read is seen.
Everything random comes from the fabric's `random.Random`: a seed and a loop that is deterministic give the same run.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from kvd import limits
from kvd.errors import ErrorCode, InternalError
from kvd.transport.nixl.queue import Slice

if TYPE_CHECKING:
    from tests.support.fake_transport import FakeTransport

Bytes = npt.NDArray[np.uint8]

STEPS = 4
"""Steps in which a slice lands."""

PAGE = 4096


class Loop(Protocol):
    """What the fake needs of a loop; asyncio's has it. Callbacks of `call_soon` run in the order of the calls."""

    def time(self) -> float:
        """Seconds."""

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> Any:
        """Runs `callback(*args)` next."""

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> Any:
        """Runs `callback(*args)` in `delay` seconds."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one read: `slow` multiplies its time, a `stuck` one stops half-way until the fabric is healed,
    one that `fails` ends as soon as half of its bytes have landed.
    """

    slow: float = 1.0
    stuck: bool = False
    fails: bool = False


@dataclass(slots=True)
class Faults:
    """What goes wrong by chance; each number is the probability for one read, or for one `add_peer`."""

    random: random.Random
    slow: float = 0.0
    stuck: float = 0.0
    fails: float = 0.0
    add_peer: float = 0.0

    def of_read(self) -> Fault:
        """One draw for each kind of fault, so that the draws do not depend on each other's outcome."""
        slow, stuck, fails = (self.random.random() for _ in range(3))
        return Fault(100.0 if slow < self.slow else 1.0, stuck < self.stuck, fails < self.fails)

    def of_add_peer(self) -> bool:
        """Whether it fails."""
        return self.random.random() < self.add_peer


@dataclass(slots=True, eq=False)
class FakeRead:
    """A read under way: bytes landed, slices posted, why it will not land."""

    key: int
    agent: str
    local_base: int
    remote_base: int
    size: int
    fault: Fault
    stamp: int = 0
    direct: bool = False
    """The other side's transport has no part in it."""
    posted: int = 0
    landed: int = 0
    started: float = 0.0
    failure: str = ""
    aborted: bool = False


@dataclass(slots=True, eq=False)
class Flight:
    """A slice on its way, `step` of `STEPS` done."""

    reader: FakeTransport
    read: FakeRead
    piece: Slice
    step: int = 0


class FakeFabric:
    """The world of some `FakeTransport`s: one address space for all, and the faults that may be called for."""

    def __init__(
        self,
        loop: Loop,
        rng: random.Random,
        faults: Faults | None = None,
        *,
        latency: float = 20e-6,
        bytes_per_second: float = 10e9,
        direct: bool = False,
    ) -> None:
        self.loop = loop
        self.faults = faults or Faults(rng)
        self.direct = direct
        """Whether reads say that the other side's transport had no part in them."""
        self._random = rng
        self._latency = latency
        self._bytes_per_second = bytes_per_second
        self._agents: dict[str, FakeTransport] = {}
        self._memory: dict[int, Bytes] = {}
        self._next_base = 1 << 32
        self._parked: list[Flight] = []
        self._cut: set[tuple[str, str]] = set()
        self._explicit: dict[str, deque[Fault]] = {}

    # --- memory -----------------------------------------------------------------------------------------------------

    def map(self, memory: Bytes) -> int:
        """Makes `memory` (uint8 `[bytes]`) addressable; returns its base address."""
        base = self._next_base
        self._next_base += (len(memory) // PAGE + 2) * PAGE
        self._memory[base] = memory
        return base

    def unmap(self, base: int) -> None:
        """Ends that. A slice that touches it later raises: whoever unmapped it broke a promise."""
        del self._memory[base]

    def view(self, address: int, length: int) -> Bytes:
        """The bytes at an address.

        Raises:
            InternalError: nothing, or not that much, is mapped there.

        """
        for base, memory in self._memory.items():
            if base <= address and address + length <= base + len(memory):
                return memory[address - base : address - base + length]
        raise InternalError(ErrorCode.INTERNAL, f"{length} bytes at {address:#x} are not mapped")

    def stamp(self, reader: str, read: FakeRead) -> int:
        """What lies at the address of a read's stamp now; 0 where that cannot be read."""
        if not read.stamp or self.serving(read) is None or (reader, read.agent) in self._cut:
            return 0
        try:
            word = self.view(read.stamp, limits.STAMP_BYTES)
        except InternalError:
            return 0
        return int.from_bytes(word.tobytes(), "little")

    # --- faults -----------------------------------------------------------------------------------------------------

    def fault_next_read(self, reader: str, fault: Fault) -> None:
        """The next read of `reader` that has no other fault called for has this one."""
        self._explicit.setdefault(reader, deque()).append(fault)

    def kill(self, agent: str) -> None:
        """The process of `agent` is gone: it does and hears nothing more, reads from it fail."""
        self._agents.pop(agent).die()
        self._resume(lambda flight: flight.read.agent == agent)

    def cut(self, one: str, other: str) -> None:
        """Bytes stop flowing between two agents, and nobody is told, until `heal`."""
        self._cut |= {(one, other), (other, one)}

    def heal(self) -> None:
        """Everything that is cut or stuck flows again."""
        self._cut.clear()
        self._resume(lambda _: True)

    # --- what transports use ----------------------------------------------------------------------------------------

    def join(self, transport: FakeTransport) -> None:
        """A transport started."""
        if transport.agent in self._agents:
            raise InternalError(ErrorCode.INTERNAL, f"two agents are named {transport.agent!r}")
        self._agents[transport.agent] = transport

    def leave(self, agent: str) -> None:
        """A transport stopped."""
        if agent in self._agents:
            self.kill(agent)

    def knows(self, agent: str) -> bool:
        """Whether that agent's process is alive."""
        return agent in self._agents

    def serving(self, read: FakeRead) -> FakeTransport | None:
        """Whose memory a read finds; None where that is gone."""
        return self._agents.get(read.agent)

    def is_direct(self) -> bool:
        """Whether the next read is."""
        return self.direct

    def fault_of_read(self, reader: str) -> Fault:
        """What is to happen to a new read."""
        explicit = self._explicit.get(reader)
        return explicit.popleft() if explicit else self.faults.of_read()

    def launch(self, flight: Flight) -> None:
        """A slice is posted."""
        self.loop.call_later(self._latency * self._random.uniform(0.5, 1.5), self._step, flight)

    def _resume(self, chosen: Callable[[Flight], bool]) -> None:
        going = [flight for flight in self._parked if chosen(flight)]  # before any fault changes: slices share them
        self._parked = [flight for flight in self._parked if flight not in going]
        for flight in going:
            flight.read.fault = Fault(flight.read.fault.slow, False, flight.read.fault.fails)
            self.launch(flight)

    def _step(self, flight: Flight) -> None:
        read, reader = flight.read, flight.reader
        if not reader.alive:
            return
        half_way = read.landed * 2 >= read.size
        serving = self.serving(read)
        if (reader.agent, read.agent) in self._cut:
            self._parked.append(flight)
        elif serving is None:
            reader.slice_ended(flight, f"agent {read.agent!r} is gone", lost=True)
        elif read.fault.stuck and half_way:
            self._parked.append(flight)
        elif read.fault.fails and half_way:
            reader.slice_ended(flight, "a fault was injected")
        elif not serving.exposes(flight):
            reader.slice_ended(flight, f"agent {read.agent!r} has not registered the memory read")
        else:
            self._copy(flight)
            flight.step += 1
            if flight.step == STEPS:
                reader.slice_ended(flight)
            else:
                seconds = flight.piece.bytes / STEPS / self._bytes_per_second * read.fault.slow
                self.loop.call_later(seconds * self._random.uniform(0.5, 1.5), self._step, flight)

    def _copy(self, flight: Flight) -> None:
        """Lands the bytes of one step: the slice's bytes in the order of its descriptors, a quarter at a time."""
        piece, read = flight.piece, flight.read
        first, last = (piece.bytes * step // STEPS for step in (flight.step, flight.step + 1))
        at = 0
        for index in range(piece.start, piece.stop):
            length = int(piece.chunk.length[index])
            start, stop = max(first - at, 0), min(last - at, length)
            if start < stop:
                source = self.view(read.remote_base + int(piece.chunk.src[index]) + start, stop - start)
                self.view(read.local_base + int(piece.chunk.dst[index]) + start, stop - start)[:] = source
            at += length
        read.landed += last - first
