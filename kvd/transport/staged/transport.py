"""The transport to other hosts with pools in GPUs' memory: a layer over one that moves host memory only.

Host memory is read as below. For the rest there is host memory that is registered with the network
(`kvd.transport.staged.arena`): an *arena* for each of our pools, into whose windows `server.py` copies for peers, and
*buffers*, by which `reads.py` reads what they staged, and into our pools.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import structlog
from msgspec.structs import replace

from kvd.errors import DeviceError, InternalError, KvdError
from kvd.transport.interface import (
    Deregistered,
    Described,
    Event,
    Landed,
    Network,
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
    TransportDied,
)
from kvd.transport.path import STAGED_HERE, STAGED_THERE
from kvd.transport.slices import U64
from kvd.transport.staged import messages
from kvd.transport.staged.arena import Buffers, Device
from kvd.transport.staged.messages import Metadata
from kvd.transport.staged.parts import StagedPeer
from kvd.transport.staged.reads import StagedReads
from kvd.transport.staged.server import ServedPools

_log = structlog.get_logger("kvd.transport")

BUFFERS: int = -1
"""The number of the buffers among the pools of the network."""


class StagedTransport:
    """`kvd.transport.interface.Transport` over `network`, which was not started. `loop` is asyncio's, or a test's.

    `buffers` are registered when they are needed first. `device` is the GPU that our pools are on; None if they are in
    host memory.
    """

    def __init__(self, network: Network, buffers: Buffers, device: Device | None, loop: Any) -> None:
        self.agent = network.agent
        """The name under which peers add this agent."""
        self._network = network
        self._buffers = buffers
        self._has_buffers = False
        self._device = device
        self._served = ServedPools(network, device, self._copy, loop, emit=self._emit) if device else None
        self._reads = StagedReads(network, buffers, self._copy, loop, emit=self._emit, idle=self._idle)
        self._adding: dict[str, tuple[bytes, Metadata]] = {}
        self._peers: dict[str, StagedPeer] = {}
        self._leaving: set[str] = set()
        """Peers to be removed when their staged reads have ended."""
        self._on_event: Callable[[Event], None]
        self._stopped = False

    @property
    def metadata(self) -> bytes:
        """What a peer needs to add this agent, as of the last event that changed it; empty while nobody can."""
        return self._written(self._network.metadata)

    def _written(self, network: bytes, pools: tuple[int, ...] | None = None) -> bytes:
        if not network:
            return b""
        return messages.encode(Metadata(network, self._served.staged(pools) if self._served else {}))

    def start(self, on_event: Callable[[Event], None]) -> None:
        """Starts; `on_event` is called on the loop."""
        self._on_event = on_event
        self._network.start(self._heard)
        if self._served is not None:
            self._register_buffers()

    def _register_buffers(self) -> None:
        if not self._has_buffers:
            self._has_buffers = True
            self._network.register(BUFFERS, self._buffers.region)

    # --- our pools --------------------------------------------------------------------------------------------------

    def register(self, pool: int, region: Region) -> None:
        """Registers memory; answered by `Registered` or `RegisterFailed`."""
        if self._served is None or not region.device:
            self._network.register(pool, region)
        else:
            self._served.register(pool, region)

    def deregister(self, pool: int, *, returns: bool = False) -> None:
        """Ends a registration that no open read uses; answered by `Deregistered`."""
        if self._served is None or not self._served.deregister(pool, returns=returns):
            self._network.deregister(pool)

    def describe(self, pools: tuple[int, ...]) -> None:
        """Asks for metadata that covers the registrations of `pools` only; answered by `Described`."""
        self._network.describe(pools)

    # --- peers ------------------------------------------------------------------------------------------------------

    def add_peer(self, agent: str, metadata: bytes, address: str = "") -> None:
        """Makes `agent` reachable; answered by `PeerAdded` or `PeerFailed`."""
        parts = messages.metadata(metadata)
        if parts is None:
            self.remove_peer(agent)
            self._emit(PeerFailed(agent, "its metadata for other hosts is not of a form known here"))
            return
        if parts.staged or self._served is not None:  # in case they were refused before
            self._register_buffers()
        self._leaving.discard(agent)
        self._adding[agent] = metadata, parts
        self._network.add_peer(agent, parts.network, address)

    def remove_peer(self, agent: str) -> None:
        """Forgets `agent` once its reads have ended. No answer."""
        self._adding.pop(agent, None)
        peer = self._peers.get(agent)
        if peer is not None and peer.reads:
            self._leaving.add(agent)
        else:
            self._peers.pop(agent, None)
            self._network.remove_peer(agent)

    def _idle(self, agent: str) -> None:
        """Its last staged read has ended."""
        if agent in self._leaving:
            self._leaving.remove(agent)
            self.remove_peer(agent)

    def read(self, request: ReadRequest) -> None:
        """Starts a read; its number must not be that of an open one. It ends in `Landed` or `ReadFailed`."""
        peer = self._peers.get(request.agent)
        size = self._served.size_at(request.local_base) if self._served else None
        staged = peer is not None and request.remote_base in peer.boards
        if peer is None or not (staged or size is not None):
            self._network.read(request)
        elif request.agent in self._leaving:
            self._emit(ReadFailed(request.read, f"agent {request.agent!r} is being removed"))
        elif request.expected:
            self._emit(request.unproven())  # no stamp is read over a network
        elif size is not None and (fault := _outside(request, size)):
            self._emit(ReadFailed(request.read, fault))
        else:
            self._reads.begin(request, peer, into_gpu=size is not None)

    def abort(self, read: int) -> None:
        """Asks for an early end of a read; unknown and ended reads are ignored."""
        self._reads.abort(read)
        self._network.abort(read)

    # --- the rest ---------------------------------------------------------------------------------------------------

    def expect_connection(self) -> None:
        """A peer has this agent's metadata and will connect: for a while, answer it promptly."""
        self._network.expect_connection()

    def expect_readers(self, expected: bool) -> None:
        """Whether peers are about to read from this agent: while they are, answer them promptly."""
        self._network.expect_readers(expected)

    def ping(self, number: int) -> None:
        """Asks for a sign of life; answered by `Answered`."""
        self._network.ping(number)

    def stop(self) -> None:
        """Shuts down in order and waits for it. Open reads get no more events."""
        self._stopped = True
        self._network.stop()
        if self._device is not None:
            self._device.close()

    def _copy(self, targets: U64, sources: U64, lengths: U64, done: Callable[[str], None]) -> None:
        """Copies, as `Copy`; a GPU that is lost, or a thread that raised, is the end of this transport."""
        assert self._device is not None  # noqa: S101 - nothing is copied without pools on a GPU

        def copied(error: KvdError | None) -> None:
            if self._stopped:
                return
            if isinstance(error, InternalError):
                self._emit(TransportDied(error.text))
                return  # it may land yet, so its window and its read do not end
            done(error.text if error else "")
            if isinstance(error, DeviceError) and error.lost:
                self._emit(TransportDied(error.text))

        self._device.copy(targets, sources, lengths, copied)

    def _emit(self, event: Event) -> None:
        if not self._stopped:
            self._on_event(event)

    def _heard(self, event: NetworkEvent) -> None:
        """What the network says."""
        match event:
            case Notified():
                self._take_message(event)
            case Landed() | ReadFailed() if self._reads.ended(event):
                pass
            case Registered() | RegisterFailed() | Deregistered():
                self._registration(event)
            case NetworkUp():
                self._emit(replace(event, metadata=self.metadata))
            case Described():
                self._emit(replace(event, metadata=self._written(event.metadata, event.pools)))
            case PeerAdded():
                self._added(event)
            case PeerFailed():
                self._failed(event)
            case NetworkDown():
                if self._served is not None:
                    self._served.network_down()
                self._emit(event)
            case _:
                self._emit(event)

    def _take_message(self, event: Notified) -> None:
        message = messages.message(event.content)
        if message is not None and self._served is not None:
            self._served.hear(event.agent, message)

    def _registration(self, event: Registered | RegisterFailed | Deregistered) -> None:
        if event.pool == BUFFERS:
            self._has_buffers = isinstance(event, Registered)
            if isinstance(event, RegisterFailed):
                _log.error("no buffers for reads from other hosts; next try with the next peer", reason=event.reason)
            return
        if self._served is not None and not self._stopped:
            if isinstance(event, Registered):
                self._served.registered(event.pool)
            else:
                self._served.ended(event.pool)
        self._emit(event if isinstance(event, RegisterFailed) else replace(event, metadata=self.metadata))

    def _added(self, event: PeerAdded) -> None:
        adding = self._adding.get(event.agent)
        if adding is None or adding[1].network != event.metadata:
            return  # it is being added by newer metadata
        metadata, parts = self._adding.pop(event.agent)
        peer = self._peers.setdefault(event.agent, self._reads.peer(event.agent))
        peer.learn(parts.staged)
        there, here = bool(parts.staged), self._device is not None
        staged = [entry for entry, holds in ((STAGED_THERE, there), (STAGED_HERE, here)) if holds]
        path = " ".join([*event.path.split(), *staged])
        self._emit(replace(event, metadata=metadata, path=path))

    def _failed(self, event: PeerFailed) -> None:
        self._adding.pop(event.agent, None)
        self._leaving.discard(event.agent)
        peer = self._peers.pop(event.agent, None)
        self._emit(event)
        if peer is not None:
            self._reads.lost(peer, event.reason)


def _outside(request: ReadRequest, size: int) -> str:
    """Why a read cannot go into a pool of that many bytes; empty if it can."""
    descriptors = request.descriptors
    if not descriptors.count:
        return ""
    ends = np.minimum(descriptors.dst, np.uint64(size)) + np.minimum(descriptors.length, np.uint64(size + 1))
    if int(ends.max()) <= size:
        return ""
    worst = int(ends.argmax())
    where = f"{descriptors.length[worst]} bytes at {descriptors.dst[worst]}"
    return f"{where} are outside of the {size} bytes registered at {request.local_base:#x}"
