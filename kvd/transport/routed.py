"""Two transports as one: peers of this host are read within the host, all others over the network.

Which of them serves a peer is decided when the peer is added, and known here only. A peer of this host whose pools
cannot be imported is read over the network if both sides have one; `PeerAdded.detour` says why.

Of a pool, the network hears first and the host last, and what the last one says is the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from kvd import limits
from kvd.errors import BadRequest
from kvd.protocol.codec import Decoder
from kvd.transport.interface import (
    Answered,
    Deregistered,
    Described,
    Event,
    NetworkUp,
    PeerAdded,
    PeerFailed,
    ReadRequest,
    Region,
    Registered,
    RegisterFailed,
    Transport,
)


class Metadata(Struct, frozen=True, array_like=True):
    """What each transport needs of a peer; `network` is empty if it has none."""

    same_host: Annotated[bytes, Meta(max_length=4 * limits.KIB)]
    network: Annotated[bytes, Meta(max_length=limits.MAX_METADATA_BYTES)]


_encode = msgspec.msgpack.Encoder().encode
_decoder = Decoder[Metadata](Metadata)


class _Attempt(Struct, frozen=True):
    """A peer that is being added by `metadata`, and why the host could not; empty while it tries."""

    metadata: bytes
    parts: Metadata
    detour: str = ""


class RoutedTransport:
    """`kvd.transport.interface.Transport` over two of the same agent, none started; without a network it has none."""

    def __init__(self, same_host: Transport, network: Transport | None) -> None:
        self.agent = same_host.agent
        """The name under which peers add this agent."""
        self._same_host = same_host
        self._network = network
        self._near: set[str] = set()
        """Agents that are read within the host."""
        self._adding: dict[str, _Attempt] = {}
        self._registering: dict[int, Region] = {}
        self._failed: dict[int, RegisterFailed] = {}
        """Pools that the host could not take, until the network has let go of them."""
        self._described: dict[tuple[int, ...], bytes] = {}
        """What the network says of some pools, while the host is asked."""
        self._on_event: Callable[[Event], None]

    @property
    def metadata(self) -> bytes:
        """What a peer needs to add this agent, as of the last event that changed it."""
        return self._join(self._same_host.metadata, self._network.metadata if self._network else b"")

    def start(self, on_event: Callable[[Event], None]) -> None:
        """Starts both; `on_event` is called on the loop."""
        self._on_event = on_event
        self._same_host.start(self._heard_from_host)
        if self._network is not None:
            self._network.start(self._heard_from_network)

    @staticmethod
    def _join(same_host: bytes, network: bytes) -> bytes:
        return _encode(Metadata(same_host, network))

    # --- our pools --------------------------------------------------------------------------------------------------

    def register(self, pool: int, region: Region) -> None:
        """Registers memory; answered by `Registered` or `RegisterFailed`."""
        if self._network is None:
            self._same_host.register(pool, region)
        else:
            self._registering[pool] = region
            self._network.register(pool, region)

    def deregister(self, pool: int, *, returns: bool = False) -> None:
        """Ends a registration that no open read uses; answered by `Deregistered`."""
        (self._network or self._same_host).deregister(pool, returns=returns)

    def describe(self, pools: tuple[int, ...]) -> None:
        """Asks for metadata that covers the registrations of `pools` only; answered by `Described`."""
        (self._network or self._same_host).describe(pools)

    # --- peers ------------------------------------------------------------------------------------------------------

    def add_peer(self, agent: str, metadata: bytes, address: str = "") -> None:
        """Makes `agent` reachable, within the host if that is possible; answered by `PeerAdded` or `PeerFailed`."""
        try:
            parts = _decoder.decode(metadata)
        except BadRequest as error:
            self.remove_peer(agent)
            self._on_event(PeerFailed(agent, f"its metadata cannot be read: {error.text}"))
            return
        self._adding[agent] = _Attempt(metadata, parts)
        self._same_host.add_peer(agent, parts.same_host, address)

    def remove_peer(self, agent: str) -> None:
        """Forgets `agent` once its reads have ended. No answer."""
        self._adding.pop(agent, None)
        self._near.discard(agent)
        for transport in self._both:
            transport.remove_peer(agent)

    def read(self, request: ReadRequest) -> None:
        """Starts a read; its number must not be that of an open one. It ends in `Landed` or `ReadFailed`."""
        far = None if request.agent in self._near else self._network
        (far or self._same_host).read(request)

    def abort(self, read: int) -> None:
        """Asks for an early end of a read; unknown and ended reads are ignored."""
        for transport in self._both:
            transport.abort(read)

    # --- the rest ---------------------------------------------------------------------------------------------------

    def expect_connection(self) -> None:
        """A peer has this agent's metadata and will connect: for a while, answer it promptly."""
        for transport in self._both:
            transport.expect_connection()

    def expect_readers(self, expected: bool) -> None:
        """Whether peers are about to read from this agent: while they are, answer them promptly."""
        for transport in self._both:
            transport.expect_readers(expected)

    def ping(self, number: int) -> None:
        """Asks both for a sign of life; answered by `Answered`."""
        self._same_host.ping(number)

    def stop(self) -> None:
        """Shuts down in order and waits for it. Open reads get no more events."""
        for transport in reversed(self._both):  # the process of the network's may have the other's lock
            transport.stop()

    @property
    def _both(self) -> tuple[Transport, ...]:
        return (self._same_host,) if self._network is None else (self._same_host, self._network)

    # --- events -----------------------------------------------------------------------------------------------------

    def _heard_from_host(self, event: Event) -> None:
        match event:
            case Registered() | Deregistered():
                self._on_event(replace(event, metadata=self.metadata))
            case Described():
                network = self._described.pop(event.pools, b"")
                self._on_event(Described(event.pools, self._join(event.metadata, network)))
            case PeerAdded():
                self._added_within_host(event)
            case RegisterFailed() if self._network is not None:
                self._failed[event.pool] = event
                self._network.deregister(event.pool)
            case PeerFailed():
                self._failed_within_host(event)
            case Answered() if self._network is not None:
                self._network.ping(event.number)
            case _:
                self._on_event(event)

    def _added_within_host(self, event: PeerAdded) -> None:
        attempt = self._adding.get(event.agent)
        if attempt is None or event.metadata != attempt.parts.same_host:
            return  # it is being added by newer metadata
        del self._adding[event.agent]
        self._near.add(event.agent)
        if self._network is not None:
            self._network.remove_peer(event.agent)
        self._on_event(replace(event, metadata=attempt.metadata))

    def _failed_within_host(self, event: PeerFailed) -> None:
        """A peer that is being added is tried over the network; one that was lost is lost."""
        self._near.discard(event.agent)
        attempt = self._adding.pop(event.agent, None)
        if attempt is None or self._network is None or not attempt.parts.network:
            self._on_event(event)
            return
        self._adding[event.agent] = replace(attempt, detour=event.reason)
        self._network.add_peer(event.agent, attempt.parts.network)

    def _heard_from_network(self, event: Event) -> None:
        match event:
            case Registered():
                self._same_host.register(event.pool, self._registering.pop(event.pool))
            case RegisterFailed():
                del self._registering[event.pool]
                self._on_event(event)
            case Deregistered() if event.pool in self._failed:
                self._on_event(self._failed.pop(event.pool))
            case Deregistered():
                self._same_host.deregister(event.pool)
            case Described():
                self._described[event.pools] = event.metadata
                self._same_host.describe(event.pools)
            case PeerAdded():
                self._added_over_network(event)
            case PeerFailed() if event.agent in self._near:
                pass  # it is read within the host since
            case PeerFailed():
                self._adding.pop(event.agent, None)
                self._on_event(event)
            case NetworkUp():
                self._on_event(NetworkUp(self.metadata))
            case _:
                self._on_event(event)

    def _added_over_network(self, event: PeerAdded) -> None:
        attempt = self._adding.get(event.agent)
        if attempt is None or not attempt.detour or event.metadata != attempt.parts.network:
            return  # it is read within the host since, or is being added by newer metadata
        del self._adding[event.agent]
        self._on_event(replace(event, metadata=attempt.metadata, detour=attempt.detour))
