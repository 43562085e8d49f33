"""A transport in memory that moves real bytes over time, with the faults that its fabric injects."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvd.errors import ErrorCode, InternalError
from kvd.transport.interface import (
    Answered,
    Deregistered,
    Described,
    Landed,
    NetworkDown,
    NetworkEvent,
    NetworkUp,
    Notified,
    PeerAdded,
    PeerFailed,
    ReadFailed,
    ReadRequest,
    Region,
    Registered,
    RegisterFailed,
)
from kvd.transport.slices import U64, Slice, SliceQueue
from tests.support.fake_fabric import Bytes, FakeFabric, FakeRead, Flight, Place, Remote


@dataclass(slots=True, eq=False)
class _Peer:
    remote: Remote
    reads: set[int] = field(default_factory=set)
    leaving: bool = False
    lost: bool = False
    again: bytes | None = None


class FakeTransport:
    """A `Transport` and a `Network` over a `FakeFabric`. Commands and events each take a turn of the loop."""

    def __init__(self, agent: str, fabric: FakeFabric) -> None:
        self.alive = False
        self.process, self.down = 0, False
        self._joining: dict[str, bytes] = {}
        """Metadata of peers that wait for the process."""
        self._agent = agent
        self._fabric = fabric
        self._on_event: Callable[[NetworkEvent], None]
        self._pools: dict[int, Place] = {}
        self._hidden: set[int] = set()
        self._registrations = 0
        self._metadata = self._describe()
        self._slices = SliceQueue()
        self._peers: dict[str, _Peer] = {}
        self._reads: dict[int, FakeRead] = {}

    @property
    def agent(self) -> str:
        """The name under which peers add this agent."""
        return self._agent

    @property
    def metadata(self) -> bytes:
        """What a peer needs to add this agent, as of the last event that changed it."""
        return self._metadata

    def start(self, on_event: Callable[[Any], None]) -> None:
        """Joins the fabric."""
        self._on_event = on_event
        self.alive = True
        self._fabric.join(self)

    def register(self, pool: int, region: Region) -> None:
        """Registers memory; answered by `Registered` or `RegisterFailed`."""
        self._soon(self._register, pool, region)

    def deregister(self, pool: int, *, returns: bool = False) -> None:
        """Ends a registration that no open read uses; answered by `Deregistered`."""
        self._soon(self._deregister, pool)

    def describe(self, pools: tuple[int, ...]) -> None:
        """Asks for metadata that covers the registrations of `pools` only; answered by `Described`."""
        self._soon(lambda: self._emit(Described(pools, self._describe(pools))))

    def add_peer(self, agent: str, metadata: bytes, address: str = "") -> None:
        """Makes `agent` reachable; answered by `PeerAdded` or `PeerFailed`."""
        self._soon(self._add_peer, agent, metadata)

    def remove_peer(self, agent: str) -> None:
        """Forgets `agent` once its reads have ended. No answer."""
        self._soon(self._remove_peer, agent)

    def read(self, request: ReadRequest) -> None:
        """Starts a read."""
        self._soon(self._read, request)

    def abort(self, read: int) -> None:
        """Asks for an early end of a read; unknown and ended reads are ignored."""
        self._soon(self._abort, read)

    def notify(self, agent: str, content: bytes) -> None:
        """Sends a message to a peer."""
        self._soon(self._notify, agent, content)

    def _notify(self, agent: str, content: bytes) -> None:
        peer = self._peers.get(agent)
        if peer is not None and not peer.lost:
            self._fabric.tell(agent, peer.remote.process, Notified(self._agent, content))

    def expect_connection(self) -> None:
        """Nothing to do: a read needs no connection."""

    def expect_readers(self, expected: bool) -> None:
        """Nothing to do: the side that is read from need not make progress."""

    def ping(self, number: int) -> None:
        """Asks for a sign of life; answered by `Answered`."""
        self._soon(self._emit, Answered(number))

    def stop(self) -> None:
        """Leaves the fabric: peers lose this agent, and its reads move no more bytes."""
        self._fabric.leave(self._agent)

    # --- for the fabric ---------------------------------------------------------------------------------------------

    def hear(self, event: NetworkEvent) -> None:
        """Another agent has sent something."""
        self._emit(event)

    def die(self) -> None:
        """From now on nothing is heard from this transport."""
        self.alive = False

    def lose_process(self) -> None:
        """The process ends that reads and serves over the network; what is read within the host goes on."""
        self.process, self.down = self.process + 1, True
        self._emit(NetworkDown("it was killed"))
        far = [agent for agent, peer in self._peers.items() if not peer.remote.reach.same_host]
        for agent in far:
            peer = self._peers.pop(agent)
            if not peer.lost or peer.again is not None:
                self._emit(PeerFailed(agent, "the process was killed"))
            for key in sorted(peer.reads):
                self._slices.drop(key)
                self._reads.pop(key).over = True
                self._emit(ReadFailed(key, "the process was killed"))

    def gain_process(self) -> None:
        """The next one runs."""
        if self.down:
            self.down = False
            self._emit(NetworkUp(self._describe()))
            joining, self._joining = self._joining, {}
            for agent, metadata in joining.items():
                self._add_peer(agent, metadata)

    def exposes(self, flight: Flight) -> bool:
        """Whether the bytes that a slice reads from this agent are registered."""
        read, standing = flight.read, set(self._pools.values())
        if read.remote.reach.same_host:
            return True  # it is mapped, whatever has become of it here
        places = [place for place in read.remote.places if place in standing]
        return _covers(places, read.request.remote_base, flight.piece.chunk.src, flight.piece)

    def export(self, places: Sequence[Place]) -> Mapping[int, Bytes]:
        """The memory of those of these registrations that stand, by address."""
        standing = set(self._pools.values())
        return {place.base: self._fabric.view(place.base, place.size) for place in places if place in standing}

    def slice_ended(self, flight: Flight, failure: str = "", lost: bool = False) -> None:
        """Nothing of this slice lands any more."""
        read, agent = flight.read, flight.read.request.agent
        read.posted -= 1
        self._slices.ended(flight.piece)
        if read.over:
            self._pump()
            return
        peer = self._peers.get(agent)
        if lost and peer and not peer.lost:
            self._fail_peer(agent, failure)
        elif failure:
            self._fail(read, failure)
        else:
            self._end_if_done(read)
        self._pump()

    # --- commands ---------------------------------------------------------------------------------------------------

    def _register(self, pool: int, region: Region) -> None:
        try:
            self._fabric.view(region.base, region.size)
        except InternalError as error:
            self._emit(RegisterFailed(pool, str(error)))
        else:
            self._registrations += 1
            self._pools[pool] = Place(self._registrations, region.base, region.size)
            if region.hidden:
                self._hidden.add(pool)
            self._emit(Registered(pool, self._describe()))

    def _deregister(self, pool: int) -> None:
        del self._pools[pool]
        self._hidden.discard(pool)
        self._emit(Deregistered(pool, self._describe()))

    def _add_peer(self, agent: str, metadata: bytes) -> None:
        try:
            named, rows, process = json.loads(metadata)
        except ValueError:
            named, rows, process = None, [], 0
        known = self._peers.get(agent)
        if known and known.lost and named == agent:
            known.again = metadata
        elif named != agent:
            self._fail_peer(agent, f"its metadata is about {named!r}")
        elif not self._fabric.knows(agent) or self._fabric.faults.of_add_peer():
            self._fail_peer(agent, "the connection failed")
        else:
            remote = self._fabric.remote(agent, tuple(Place(*row) for row in rows), process)
            if self.down and not remote.reach.same_host:
                self._joining[agent] = metadata
                return
            if not self._fabric.serves(agent, remote):
                self._fail_peer(agent, "nobody serves there")
                return
            peer = self._peers.setdefault(agent, _Peer(remote))
            peer.remote, peer.leaving = remote, False
            path = "copy/memory" if remote.reach.same_host else ""
            self._emit(PeerAdded(agent, metadata, path, remote.reach.same_host, remote.reach.stamps))

    def _remove_peer(self, agent: str) -> None:
        self._joining.pop(agent, None)
        if agent in self._peers:
            self._peers[agent].leaving, self._peers[agent].again = True, None
            self._forget_if_done(agent)

    def _read(self, request: ReadRequest) -> None:
        key, agent = request.read, request.agent
        if key in self._reads:
            raise InternalError(ErrorCode.INTERNAL, f"read {key} was asked for twice")
        peer = self._peers.get(agent)
        if peer is None or peer.lost or peer.leaving:
            self._emit(ReadFailed(key, f"agent {agent!r} is not known: add it before reading from it"))
        elif request.expected and self._fabric.stamp(self._agent, request, peer.remote.reach) != request.expected:
            self._emit(request.unproven())
        elif self._slices.add(request):
            self._reads[key] = FakeRead(request, self._fabric.fault_of_read(self._agent), peer.remote)
            peer.reads.add(key)
            self._fabric.opened(self._agent, self._reads[key])
            self._pump()
        else:
            self._emit(Landed(key, 0.0))

    def _abort(self, key: int) -> None:
        if self._slices.waiting(key):
            self._reads[key].aborted = True
            self._fail(self._reads[key], "aborted")

    # --- slices and ends --------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        while (piece := self._slices.pick()) is not None:
            request = piece.request
            read = self._reads[request.read]
            read.posted += 1
            read.started = read.started or self._fabric.loop.time()
            flight = Flight(self, read, piece)
            if not _covers(list(self._pools.values()), request.local_base, piece.chunk.dst, piece):
                self.slice_ended(flight, "the memory read into is not registered")
            elif not _covers(_reachable(read), request.remote_base, piece.chunk.src, piece):
                self.slice_ended(flight, f"the memory read is not in the metadata of agent {request.agent!r}")
            else:
                self._fabric.launch(flight)

    def _fail_peer(self, agent: str, reason: str) -> None:
        self._emit(PeerFailed(agent, reason))
        peer = self._peers.get(agent)
        if peer:
            peer.lost = True
            for key in sorted(peer.reads):
                self._fail(self._reads[key], f"lost agent {agent!r}: {reason}")
            self._forget_if_done(agent)

    def _fail(self, read: FakeRead, reason: str) -> None:
        read.failure = read.failure or reason
        self._slices.drop(read.request.read)
        self._end_if_done(read)

    def _end_if_done(self, read: FakeRead) -> None:
        key, agent = read.request.read, read.request.agent
        if read.posted or self._slices.waiting(key):
            return
        del self._reads[key]
        if read.failure:
            self._emit(ReadFailed(key, read.failure, read.aborted))
        else:
            seconds = self._fabric.loop.time() - read.started
            self._emit(Landed(key, seconds, self._fabric.stamp(self._agent, read.request, read.remote.reach)))
        self._peers[agent].reads.remove(key)
        self._forget_if_done(agent)

    def _forget_if_done(self, agent: str) -> None:
        peer = self._peers.get(agent)
        if peer and not peer.reads and (peer.lost or peer.leaving):
            del self._peers[agent]
            if peer.again is not None:
                self._add_peer(agent, peer.again)

    def _describe(self, pools: tuple[int, ...] | None = None) -> bytes:
        told = self._pools.keys() - self._hidden if pools is None else set(pools)
        places = [place for pool, place in self._pools.items() if pool in told]
        return json.dumps([self._agent, places, self.process]).encode()

    def _soon(self, command: Callable[..., None], *arguments: Any) -> None:
        self._fabric.loop.call_soon(self._if_alive, command, *arguments)

    def _if_alive(self, command: Callable[..., None], *arguments: Any) -> None:
        if self.alive:
            command(*arguments)

    def _emit(self, event: NetworkEvent) -> None:
        self._fabric.loop.call_soon(self._if_alive, self._deliver, event)

    def _deliver(self, event: NetworkEvent) -> None:
        if isinstance(event, Registered | Deregistered | NetworkUp):
            self._metadata = event.metadata
        self._on_event(event)


def _reachable(read: FakeRead) -> list[Place]:
    """Where a read may read: what its metadata names, and within a host what was there when it was imported."""
    remote = read.remote
    return [place for place in remote.places if not remote.reach.same_host or place.base in remote.imported]


def _covers(places: list[Place], base: int, offset: U64, piece: Slice) -> bool:
    """Whether each descriptor of a slice lies within one of the places."""
    part = slice(piece.start, piece.stop)
    covered = np.zeros(piece.stop - piece.start, dtype=bool)
    for _, start, size in places:
        first = offset[part] + np.uint64(base)
        covered |= (first >= start) & (first + piece.chunk.length[part] <= start + size)
    return bool(covered.all())
