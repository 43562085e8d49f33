"""What the fake transports of a run share: memory, network, clock and faults, all in one process.

Bytes of a slice land in `STEPS` steps, each copied from the source at its own moment, so tests see a producer that
overwrites a block in the middle of a read. All randomness comes from the fabric's `random.Random`, so a seed and a
deterministic loop replay a run.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvd import limits
from kvd.errors import ErrorCode, InternalError
from kvd.transport.interface import NetworkEvent, ReadRequest
from kvd.transport.slices import Slice

Bytes = npt.NDArray[np.uint8]

STEPS = 4
"""Steps in which a slice lands."""

PAGE = 4096


class Loop(Protocol):
    """What the fakes need of a loop; asyncio's will do. Callbacks of `call_soon` run in the order of the calls."""

    def time(self) -> float:
        """Now, in seconds."""

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> Any:
        """Runs `callback(*args)` next."""

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> Any:
        """Runs `callback(*args)` in `delay` seconds."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one read.

    `slow` multiplies its time. If `stuck`, it stops half-way until the fabric is healed; if it `fails`, it ends as soon
    as half of its bytes have landed.
    """

    slow: float = 1.0
    stuck: bool = False
    fails: bool = False


@dataclass(slots=True)
class Faults:
    """Random faults; each number is the probability for one read, or for one `add_peer`.

    If `blank`, what is registered no longer reads as zeros, as where no keys are checked, and does not fail.
    """

    random: random.Random
    slow: float = 0.0
    stuck: float = 0.0
    fails: float = 0.0
    add_peer: float = 0.0
    blank: bool = False

    def of_read(self) -> Fault:
        """Draws once for each kind of fault, so that no draw depends on another's outcome."""
        slow, stuck, fails = (self.random.random() for _ in range(3))
        return Fault(100.0 if slow < self.slow else 1.0, stuck < self.stuck, fails < self.fails)

    def of_add_peer(self) -> bool:
        """Whether it fails."""
        return self.random.random() < self.add_peer


@dataclass(frozen=True, slots=True)
class Reach:
    """How a peer is reached, as in `PeerAdded`."""

    same_host: bool = False
    stamps: bool = False


class Place(NamedTuple):
    """A registration: its number, which its agent uses once, its address and its size."""

    number: int
    base: int
    size: int


@dataclass(frozen=True, slots=True)
class Remote:
    """What a reader has of a peer: its registrations according to its metadata, and how it is reached.

    What it has `imported`, by address, it keeps mapped, whatever the peer does with its memory. `process` is the number
    of the process that serves others over the network.
    """

    places: tuple[Place, ...] = ()
    reach: Reach = Reach()
    imported: Mapping[int, Bytes] = field(default_factory=dict)
    process: int = 0


@dataclass(slots=True, eq=False)
class FakeRead:
    """An open read: `posted` slices, `landed` bytes, and `failure`, why it will not land.

    It is `over` if the process is gone that read; then its slices move nothing.
    """

    request: ReadRequest
    fault: Fault
    remote: Remote
    posted: int = 0
    landed: int = 0
    started: float = 0.0
    failure: str = ""
    aborted: bool = False
    over: bool = False


class Agent(Protocol):
    """A transport on the fabric."""

    alive: bool
    process: int
    """Which of its processes serves others over the network."""
    down: bool
    """Whether that is yet to start."""

    @property
    def agent(self) -> str:
        """Its name."""

    def die(self) -> None:
        """From now on nothing is heard from it."""

    def hear(self, event: NetworkEvent) -> None:
        """Another agent has sent something."""

    def exposes(self, flight: Flight) -> bool:
        """Whether the bytes that a slice reads from it are registered."""

    def export(self, places: Sequence[Place]) -> Mapping[int, Bytes]:
        """The memory of those of these registrations that stand, by address."""

    def slice_ended(self, flight: Flight, failure: str = "", lost: bool = False) -> None:
        """Nothing of its slice lands any more; `lost` if the agent it reads from is gone."""


@dataclass(slots=True, eq=False)
class Flight:
    """A posted slice, `step` of `STEPS` done."""

    reader: Agent
    read: FakeRead
    piece: Slice
    step: int = 0


class FakeFabric:
    """Connects agents: one address space for all of them, and the faults that a test asks for."""

    def __init__(
        self,
        loop: Loop,
        rng: random.Random,
        faults: Faults | None = None,
        *,
        latency: float = 20e-6,
        bytes_per_second: float = 10e9,
        stamps: bool = False,
    ) -> None:
        self.loop = loop
        self.faults = faults or Faults(rng)
        self._reach = Reach(same_host=stamps, stamps=stamps)
        self._random = rng
        self._latency = latency
        self._bytes_per_second = bytes_per_second
        self._agents: dict[str, Agent] = {}
        self._memory: dict[int, Bytes] = {}
        self._next_base = 1 << 32
        self._holes: list[tuple[int, int]] = []
        """Address and size of what was unmapped: it is used again, the latest first, as kernels do."""
        self._parked: list[Flight] = []
        self._cut: set[tuple[str, str]] = set()
        self._explicit: dict[str, deque[Fault]] = {}

    def tell(self, agent: str, process: int, event: NetworkEvent) -> None:
        """Delivers what is sent to a process of an agent, if that is there."""
        self.loop.call_later(self._latency, self._tell, agent, process, event)

    def _tell(self, agent: str, process: int, event: NetworkEvent) -> None:
        found = self._agents.get(agent)
        if found is not None and found.process == process and not found.down:
            found.hear(event)

    # --- memory -----------------------------------------------------------------------------------------------------

    def map(self, memory: Bytes) -> int:
        """Makes `memory` (uint8 `[bytes]`) addressable; returns its base address."""
        size = _footprint(memory)
        hole = next((hole for hole in reversed(self._holes) if hole[1] == size), None)
        if hole is not None:
            self._holes.remove(hole)
            base = hole[0]
        else:
            base = self._next_base
            self._next_base += size
        self._memory[base] = memory
        return base

    def unmap(self, base: int) -> None:
        """Undoes `map`. A slice that touches the memory later raises: whoever unmapped it broke a promise."""
        self._holes.append((base, _footprint(self._memory.pop(base))))

    def view(self, address: int, length: int) -> Bytes:
        """The bytes at an address.

        Raises:
            InternalError: not all of them are mapped.

        """
        for base, memory in self._memory.items():
            if base <= address and address + length <= base + len(memory):
                return memory[address - base : address - base + length]
        raise InternalError(ErrorCode.INTERNAL, f"{length} bytes at {address:#x} are not mapped")

    def stamp(self, reader: str, request: ReadRequest, reach: Reach) -> int:
        """What lies at the address of a read's stamp now, in the living process; 0 if it cannot be read."""
        cut = (reader, request.agent) in self._cut
        if not request.stamp or not reach.stamps or cut or not self.knows(request.agent):
            return 0
        try:
            word = self.view(request.stamp, limits.STAMP_BYTES)
        except InternalError:
            return 0
        return int.from_bytes(word.tobytes(), "little")

    # --- faults -----------------------------------------------------------------------------------------------------

    def fault_next_read(self, reader: str, fault: Fault) -> None:
        """The next read of `reader` that has no fault yet gets this one."""
        self._explicit.setdefault(reader, deque()).append(fault)

    def kill(self, agent: str) -> None:
        """Kills the process of `agent`: it does and hears nothing more, and reads from it fail."""
        self._agents.pop(agent).die()
        self._resume(lambda flight: flight.read.request.agent == agent)

    def cut(self, one: str, other: str) -> None:
        """Stops bytes between two agents until `heal`, without telling anyone."""
        self._cut |= {(one, other), (other, one)}

    def heal(self) -> None:
        """Lets everything that is cut or stuck flow again."""
        self._cut.clear()
        self._resume(lambda _: True)

    # --- what transports use ----------------------------------------------------------------------------------------

    def join(self, transport: Agent) -> None:
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

    def remote(self, agent: str, places: tuple[Place, ...], process: int) -> Remote:
        """What a reader that adds `agent` now has of it."""
        reach = self.reach()
        return Remote(places, reach, self._agents[agent].export(places) if reach.same_host else {}, process)

    def serves(self, agent: str, remote: Remote) -> bool:
        """Whether the process that `remote` tells of serves reads, if one is needed for that."""
        found = self._agents[agent]
        return remote.reach.same_host or (found.process == remote.process and not found.down)

    def serving(self, read: FakeRead) -> Agent | None:
        """The agent whose memory is read; None if it is gone."""
        return self._agents.get(read.request.agent)

    def reach(self) -> Reach:
        """How the next peer that is added is reached."""
        return self._reach

    def fault_of_read(self, reader: str) -> Fault:
        """The fault of a new read."""
        explicit = self._explicit.get(reader)
        return explicit.popleft() if explicit else self.faults.of_read()

    def opened(self, reader: str, read: FakeRead) -> None:
        """A read begins."""

    def launch(self, flight: Flight) -> None:
        """A slice is posted."""
        self.loop.call_later(self._latency * self._random.uniform(0.5, 1.5), self._step, flight)

    def _resume(self, chosen: Callable[[Flight], bool]) -> None:
        going = [flight for flight in self._parked if chosen(flight)]  # before faults, which slices share, change
        self._parked = [flight for flight in self._parked if flight not in going]
        for flight in going:
            flight.read.fault = Fault(flight.read.fault.slow, False, flight.read.fault.fails)
            self.launch(flight)

    def _step(self, flight: Flight) -> None:
        read, reader, agent = flight.read, flight.reader, flight.read.request.agent
        if not reader.alive:
            return
        if self._is_over(read):
            reader.slice_ended(flight)
            return
        half_way = read.landed * 2 >= read.request.descriptors.bytes
        serving = self.serving(read)
        if (reader.agent, agent) in self._cut:
            self._parked.append(flight)
        elif serving is None:
            reader.slice_ended(flight, f"agent {agent!r} is gone", lost=True)
        elif not read.remote.reach.same_host and serving.process != read.remote.process:
            reader.slice_ended(flight, f"the process of agent {agent!r} that served is gone", lost=True)
        elif read.fault.stuck and half_way:
            self._parked.append(flight)
        elif read.fault.fails and half_way:
            reader.slice_ended(flight, "a fault was injected")
        elif not serving.exposes(flight) and not self.faults.blank:
            reader.slice_ended(flight, f"agent {agent!r} has not registered the memory read")
        else:
            self._copy(flight)
            flight.step += 1
            if flight.step == STEPS:
                reader.slice_ended(flight)
            else:
                seconds = flight.piece.bytes / STEPS / self._bytes_per_second * read.fault.slow
                self.loop.call_later(seconds * self._random.uniform(0.5, 1.5), self._step, flight)

    @staticmethod
    def _is_over(read: FakeRead) -> bool:
        return read.over

    def _copy(self, flight: Flight) -> None:
        """Lands the bytes of one step: the slice's bytes in the order of its descriptors, a quarter at a time."""
        piece, read, request = flight.piece, flight.read, flight.read.request
        serving = self.serving(read)
        blank = self.faults.blank and serving is not None and not serving.exposes(flight)
        first, last = (piece.bytes * step // STEPS for step in (flight.step, flight.step + 1))
        at = 0
        for index in range(piece.start, piece.stop):
            length = int(piece.chunk.length[index])
            start, stop = max(first - at, 0), min(last - at, length)
            if start < stop:
                offset = int(piece.chunk.src[index]) + start
                source = 0 if blank else self._source(read, offset, stop - start)
                self.view(request.local_base + int(piece.chunk.dst[index]) + start, stop - start)[:] = source
            at += length
        read.landed += last - first

    def _source(self, read: FakeRead, offset: int, length: int) -> Bytes:
        imported = read.remote.imported.get(read.request.remote_base)
        if imported is not None:
            return imported[offset : offset + length]
        return self.view(read.request.remote_base + offset, length)


def _footprint(memory: Bytes) -> int:
    return (len(memory) // PAGE + 2) * PAGE
