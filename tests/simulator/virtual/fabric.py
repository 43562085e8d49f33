"""The fake transport in a simulated world: each read is checked against the mask of writable bytes in its target file.

Unlike in `tests.support.fake_transport`, events reach a daemon through its process (a stopped one gets them when it
continues), faults follow the world's knobs, and a stuck read continues after some time.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvd.transport.interface import Event, PeerAdded, PeerFailed, ReadRequest, Region, RegisterFailed, Transport
from kvd.transport.routed import RoutedTransport
from tests.simulator.checks.promises import Promise
from tests.simulator.traffic.pieces import Piece
from tests.simulator.virtual.loop import Process
from tests.simulator.virtual.memory import File
from tests.simulator.virtual.world import World
from tests.support.fake_fabric import Agent, FakeFabric, FakeRead, Fault, Flight, Reach
from tests.support.fake_transport import FakeTransport

_BYTES_PER_SECOND = 40e3
"""Slow, so that other events fall into the middle of reads."""
_SLOWDOWNS = (1.0, 1.0, 4.0, 16.0)
"""Factors of a usual read's time, drawn at random."""
_SLOWER = 200.0
"""Factor of a slow read's time: claims must be renewed meanwhile, and its deadline is still kept."""
_STUCK = 3.0
"""Seconds for which a read is stuck, at most."""
_EVENT = 0.002
"""Seconds that an event takes to arrive, at most."""
_IMPORT = 0.1
"""Seconds that importing a peer's memory takes at most, and the news of it, where that is slow."""
_DIES = 0.01
"""Seconds from a read's start to the death of its peer, or of the process that reads, at most."""
_OUTLIVES = 0.2
"""Seconds for which the memory of a killed process goes on being read: by a NIC, or out of a peer's mapping."""
_REACHES = (Reach(), Reach(same_host=True), Reach(same_host=True, stamps=True))


class SimFabric(FakeFabric):
    """All agents of the world. With several hosts it is what connects daemons of one host, and `far` the network."""

    def __init__(self, world: World, near: "SimFabric | None" = None) -> None:
        super().__init__(world.loop, world.rng, latency=0.0005, bytes_per_second=_BYTES_PER_SECOND)
        self.world = world
        several = Piece.SEVERAL_HOSTS in world.pieces
        self._reach = Reach() if near else world.rng.choice(_REACHES[several:])
        self._hosts: dict[str, int] = {}
        self.files: dict[int, File] = {}
        """By the address where a daemon has mapped them."""
        self._outlived: dict[str, Agent] = {}
        """Agents whose process is dead, but whose memory is still read for a moment."""
        self.is_told: Callable[[str, ReadRequest], bool] = lambda _reader, _request: False
        """Whether a reader knows the pool that it reads from as it stands now."""
        self._places: dict[Flight, NDArray[np.int64]] = {}
        """Which bytes of its file each slice writes."""
        if near is not None:  # memory is the same
            self.files, self._memory, self._holes = near.files, near._memory, near._holes
        self.far = SimFabric(world, self) if several and near is None else None

    def host_of(self, agent: str) -> int:
        """Which of two hosts an agent's daemon is on."""
        return self._hosts.setdefault(daemon_of(agent), self.world.rng.randrange(2))

    def cut(self, one: str, other: str) -> None:
        """Stops bytes between two agents."""
        super().cut(one, other)
        if self.far is not None:
            self.far.cut(one, other)

    def heal(self) -> None:
        """Lets everything flow again."""
        super().heal()
        if self.far is not None:
            self.far.heal()

    def map_file(self, file: File) -> int:
        """Maps a file; its address."""
        base = self.map(file.data)
        self.files[base] = file
        return base

    def unmap_file(self, base: int) -> None:
        """Undoes `map_file`."""
        self.unmap(base)
        del self.files[base]

    def crash(self, agent: str, bases: list[int]) -> None:
        """Kills the process of `agent`, which has mapped memory at `bases`."""
        self.world.loop.call_later(_OUTLIVES, self._forget, agent, bases)
        if agent in self._agents:  # it was not stopped before
            self._outlived[agent] = self._agents[agent]
            self.kill(agent)
        if self.far is not None:
            self.far.crash(agent, [])

    def _forget(self, agent: str, bases: list[int]) -> None:
        self._outlived.pop(agent, None)
        for base in bases:
            self.unmap(base)
            self.files.pop(base, None)

    def serving(self, read: FakeRead) -> Agent | None:
        """Memory outlives its process for a moment."""
        return super().serving(read) or self._outlived.get(read.request.agent)

    def reach(self) -> Reach:
        """Drawn per world, or anew for each peer that is added if paths change; with several hosts they are known."""
        several = Piece.SEVERAL_HOSTS in self.world.pieces
        changing = Piece.CHANGING_PATHS in self.world.pieces and not several
        return self.world.rng.choice(_REACHES) if changing else self._reach

    def mend(self, one: str, other: str) -> None:
        """Lets bytes flow again between two agents."""
        pair = {(one, other), (other, one)}
        self._cut -= pair
        self._resume(lambda flight: (flight.reader.agent, flight.read.request.agent) in pair)
        if self.far is not None:
            self.far.mend(one, other)

    def let_go(self) -> None:
        """Lets stuck reads continue."""
        self._resume(lambda flight: flight.read.fault.stuck)
        if self.far is not None:
            self.far.let_go()

    def fault_of_read(self, reader: str) -> Fault:
        """By the knobs. A daemon whose read sticks or fails is excused for it; one whose read is merely slow is not."""
        world, knobs = self.world, self.world.knobs
        slow = world.chance(knobs.read_slow)
        stuck = world.chance(knobs.read_sticks)
        fails = world.chance(knobs.read_fails)
        if stuck or fails:
            world.disturb(daemon_of(reader))
        if stuck:
            world.loop.call_later(world.rng.random() * _STUCK, self.let_go)
        return Fault(_SLOWER if slow else world.rng.choice(_SLOWDOWNS), stuck, fails)

    def opened(self, reader: str, read: FakeRead) -> None:
        """What a peer has at an address now is what a reader that was told of it has imported from there."""
        request = read.request
        imported = read.remote.imported.get(request.remote_base)
        if imported is None or not self.is_told(reader, request):
            return
        if not np.shares_memory(imported, self.view(request.remote_base, 1)):
            text = f"{reader} is told of a pool of {request.agent} at {request.remote_base:#x}, and reads another"
            self.world.violate(Promise.FENCED, text)

    def _copy(self, flight: Flight) -> None:
        piece, request = flight.piece, flight.read.request
        places = self._places.get(flight)
        if places is None:
            part = slice(piece.start, piece.stop)
            rows = zip(piece.chunk.dst[part].tolist(), piece.chunk.length[part].tolist(), strict=True)
            places = np.concatenate([np.arange(first, first + length) for first, length in rows])
            self._places[flight] = places
        file = self.files[request.local_base]
        lent = file.writable[places]
        if not lent.all():
            text = f"read {request.read} of {flight.reader.agent} writes {(~lent).sum()} bytes that are not lent"
            self.world.violate(Promise.QUARANTINE, f"{text}, of file {file.number}")
        super()._copy(flight)


def daemon_of(agent: str) -> str:
    """The daemon that an agent belongs to."""
    return agent.partition("#")[0]


class SimTransport(FakeTransport):
    """One daemon's agent."""

    def __init__(self, agent: str, fabric: SimFabric, process: Process) -> None:
        super().__init__(agent, fabric)
        self._world = fabric.world
        self._process = process
        self._last_event = 0.0
        self._events: deque[Event] = deque()
        pieces = self._world.pieces
        self._sim = fabric
        self._is_near = fabric.far is not None
        slow = Piece.TWO_ADDRESSES in pieces or self._is_near
        self._imports_slowly = slow and Piece.BRIEF_OFFERS not in pieces
        self._importing: dict[str, deque[tuple[float, bytes, str]]] = {}
        """Metadata that is yet to be imported, and when."""

    def start(self, on_event: Callable[[Event], None]) -> None:
        """Joins the fabric. Events arrive in order, a little later."""

        def later(event: Event) -> None:
            if self._is_near and isinstance(event, PeerAdded | PeerFailed):
                self._process.call_soon(on_event, event)  # no thread lies between
                return
            now = self._world.loop.now
            most = _IMPORT if isinstance(event, PeerAdded) and self._imports_slowly else _EVENT
            self._last_event = max(self._last_event, now + self._world.rng.random() * most)
            self._events.append(event)
            self._process.call_later(self._last_event - now, arrive)

        def arrive() -> None:
            event = self._events.popleft()  # in order, even if rounding made a later event due first
            self._world.note(self.agent, type(event).__name__, getattr(event, "read", ""), getattr(event, "agent", ""))
            on_event(event)

        super().start(later)

    def read(self, request: ReadRequest) -> None:
        """Reads; the peer, or the process that reads, dies during it if the knobs say so."""
        world = self._world
        if world.chance(world.knobs.die_while_read):
            world.loop.call_later(world.rng.random() * _DIES, world.on_death, request.agent)
        if not self._is_near and world.chance(world.knobs.transport_dies):
            world.loop.call_later(world.rng.random() * _DIES, world.on_transport_death, self.agent)
        super().read(request)

    def add_peer(self, agent: str, metadata: bytes, address: str = "") -> None:
        """Adds a peer, or fails to if the knobs say so, or if it is on another host."""
        if self._is_near:
            self._importing.pop(agent, None)  # only the latest attempt is answered
            if self._sim.host_of(agent) != self._sim.host_of(self.agent):
                self._soon(self._fail_peer, agent, "it runs on another host")
                return
        if self._world.chance(self._world.knobs.add_peer_fails):
            self._world.disturb(daemon_of(self.agent))
            metadata = b"spoilt"
        if self._imports_slowly:
            now, queue = self._world.loop.now, self._importing.setdefault(agent, deque())
            queue.append(
                (max(now + self._world.rng.random() * _IMPORT, queue[-1][0] if queue else now), metadata, address)
            )
            self._process.call_later(queue[-1][0] - now, self._import, agent, queue)
        else:
            super().add_peer(agent, metadata, address)

    def _import(self, agent: str, queue: deque[tuple[float, bytes, str]]) -> None:
        """One after the other; meanwhile reads find what was imported before."""
        if self._importing.get(agent) is queue:
            _, metadata, address = queue.popleft()
            super().add_peer(agent, metadata, address)
            if not queue:
                del self._importing[agent]

    def remove_peer(self, agent: str) -> None:
        """Forgets a peer, also one that is being imported."""
        self._importing.pop(agent, None)
        super().remove_peer(agent)

    def register(self, pool: int, region: Region) -> None:
        """Registers memory, or fails to if the knobs say so."""
        if self._world.chance(self._world.knobs.registration_fails):
            self._emit(RegisterFailed(pool, "injected"))
        else:
            super().register(pool, region)


def make_transport(agent: str, fabric: SimFabric, process: Process) -> Transport:
    """The transport of a daemon, as it is put together for its network."""
    near = SimTransport(agent, fabric, process)
    return near if fabric.far is None else RoutedTransport(near, SimTransport(agent, fabric.far, process))


def parts_of(transport: Transport) -> list[Transport]:
    """A transport, and those that it consists of."""
    both = transport._both if isinstance(transport, RoutedTransport) else ()
    return [transport, *both]


def network_of(transport: Transport) -> FakeTransport:
    """The part of a transport that reads from other hosts."""
    part = parts_of(transport)[-1]
    assert isinstance(part, FakeTransport)
    return part
