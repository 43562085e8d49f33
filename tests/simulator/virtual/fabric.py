"""The fake transport in a simulated world: its reads are held against the masks of the files that they write to.

What differs from `tests.support.fake_transport`: events reach a daemon through its own process (a stopped one gets
them when it goes on), faults follow the world's knobs, and a read that is stuck goes on some time later.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvd.transport.interface import Event, RegisterFailed
from kvd.transport.nixl.queue import Slices
from tests.simulator.checks.promises import Promise
from tests.simulator.traffic.pieces import Piece
from tests.simulator.virtual.loop import Process
from tests.simulator.virtual.memory import File
from tests.simulator.virtual.world import World
from tests.support.fake_fabric import FakeFabric, FakeRead, Fault, Flight
from tests.support.fake_transport import FakeTransport

_BYTES_PER_SECOND = 40e3
"""Slow, so that what happens meanwhile happens in the middle."""
_PACE = (1.0, 1.0, 4.0, 16.0)
"""Times that a read takes longer than at that speed."""
_SLOWER = 200.0
"""Times that a slow read takes longer: claims must be renewed meanwhile, and its deadline is still kept."""
_STUCK = 3.0
"""Seconds that a stuck read takes at most."""
_EVENT = 0.002
"""Seconds that an event takes at most."""
_DIES = 0.01
"""Seconds of a read in which the other side dies, at most."""
_OUTLIVES = 0.2
"""Seconds for which a network card goes on reading the memory of a process that was killed."""


class SimFabric(FakeFabric):
    """All agents of the world."""

    def __init__(self, world: World) -> None:
        super().__init__(world.loop, world.rng, latency=0.0005, bytes_per_second=_BYTES_PER_SECOND)
        self.direct = world.rng.random() < 0.5
        self.world = world
        self.files: dict[int, File] = {}
        """By the address where a daemon has mapped them."""
        self._outlived: dict[str, FakeTransport] = {}
        """Agents whose process is dead, and whose memory network cards read on for a moment."""
        self._places: dict[Flight, NDArray[np.int64]] = {}
        """Which bytes of its file each slice writes."""

    def map_file(self, file: File) -> int:
        """Maps a file; its address."""
        base = self.map(file.data)
        self.files[base] = file
        return base

    def unmap_file(self, base: int) -> None:
        """Ends that."""
        self.unmap(base)
        del self.files[base]

    def crash(self, agent: str, bases: list[int]) -> None:
        """The process of `agent`, which has mapped memory at `bases`, was killed."""
        if Piece.CHANGING_PATHS in self.world.pieces:
            self._outlived[agent] = self._agents[agent]
            self.world.loop.call_later(_OUTLIVES, self._forget, agent, bases)
            self.kill(agent)
        else:
            self.kill(agent)
            self._forget(agent, bases)

    def _forget(self, agent: str, bases: list[int]) -> None:
        self._outlived.pop(agent, None)
        for base in bases:
            self.unmap(base)
            self.files.pop(base, None)

    def serving(self, read: FakeRead) -> FakeTransport | None:
        """Reads that the kernel makes end with the process that they read from; those of a network card may not."""
        return super().serving(read) or (None if read.direct else self._outlived.get(read.agent))

    def is_direct(self) -> bool:
        """By the world, or by the read."""
        return self.world.rng.random() < 0.7 if Piece.CHANGING_PATHS in self.world.pieces else self.direct

    def mend(self, one: str, other: str) -> None:
        """Bytes flow again between two agents."""
        pair = {(one, other), (other, one)}
        self._cut -= pair
        self._resume(lambda flight: (flight.reader.agent, flight.read.agent) in pair)

    def let_go(self) -> None:
        """Reads that are stuck go on."""
        self._resume(lambda flight: flight.read.fault.stuck)

    def fault_of_read(self, reader: str) -> Fault:
        """By the knobs. Whoever cannot finish a read because of it is excused; one that is merely slow is not."""
        world, knobs = self.world, self.world.knobs
        slow = world.chance(knobs.read_slow)
        stuck = world.chance(knobs.read_sticks)
        fails = world.chance(knobs.read_fails)
        if stuck or fails:
            world.disturb(daemon_of(reader))
        if stuck:
            world.loop.call_later(world.rng.random() * _STUCK, self.let_go)
        return Fault(_SLOWER if slow else world.rng.choice(_PACE), stuck, fails)

    def _copy(self, flight: Flight) -> None:
        piece, read = flight.piece, flight.read
        places = self._places.get(flight)
        if places is None:
            part = slice(piece.start, piece.stop)
            rows = zip(piece.chunk.dst[part].tolist(), piece.chunk.length[part].tolist(), strict=True)
            places = np.concatenate([np.arange(first, first + length) for first, length in rows])
            self._places[flight] = places
        file = self.files[read.local_base]
        lent = file.writable[places]
        if not lent.all():
            text = f"read {read.key} of {flight.reader.agent} writes {(~lent).sum()} bytes that are not lent"
            self.world.violate(Promise.QUARANTINE, f"{text}, of file {file.number}")
        super()._copy(flight)


def daemon_of(agent: str) -> str:
    """Whose agent it is."""
    return agent.partition("#")[0]


class SimTransport(FakeTransport):
    """One daemon's agent."""

    def __init__(self, agent: str, fabric: SimFabric, process: Process) -> None:
        super().__init__(agent, fabric)
        self._world = fabric.world
        self._process = process
        self._last_event = 0.0
        self._events: deque[Event] = deque()

    def start(self, on_event: Callable[[Event], None]) -> None:
        """Joins the fabric. Events arrive in their order, a little later."""

        def later(event: Event) -> None:
            now = self._world.loop.now
            self._last_event = max(self._last_event, now + self._world.rng.random() * _EVENT)
            self._events.append(event)
            self._process.call_later(self._last_event - now, arrive)

        def arrive() -> None:
            event = self._events.popleft()  # times that are equal but for rounding must not change the order
            self._world.note(self.agent, type(event).__name__, getattr(event, "read", ""), getattr(event, "agent", ""))
            on_event(event)

        super().start(later)

    def read_share(self, agent: str, local_base: int, remote_base: int, slices: Slices, *, stamp: int = 0) -> None:
        """Reads, and has the other side die over it where the knobs say so."""
        world = self._world
        if world.chance(world.knobs.die_while_read):
            world.loop.call_later(world.rng.random() * _DIES, world.on_death, agent)
        super().read_share(agent, local_base, remote_base, slices, stamp=stamp)

    def add_peer(self, agent: str, metadata: bytes) -> None:
        """Adds a peer, or fails to where the knobs say so."""
        if self._world.chance(self._world.knobs.add_peer_fails):
            self._world.disturb(daemon_of(self.agent))
            metadata = b"spoilt"
        super().add_peer(agent, metadata)

    def register(self, pool: int, base: int, size: int) -> None:
        """Registers, or fails to where the knobs say so (never the stamps, with which a daemon starts)."""
        if pool and self._world.chance(self._world.knobs.registration_fails):
            self._emit(RegisterFailed(pool, "injected"))
        else:
            super().register(pool, base, size)
