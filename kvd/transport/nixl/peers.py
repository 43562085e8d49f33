"""The agents that a NIXL agent reads from: loading their metadata, connecting, and forgetting them again.

When a peer dies, NIXL closes the connection, forgets the peer, and raises the same error for each of its slices. The
peer's reads fail as their slices end. If the peer is added again before that, it waits, because NIXL must have
forgotten the old connection first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvd.limits import MAX_AGENT_BYTES
from kvd.transport.interface import AgentEvent, PeerAdded, PeerFailed
from kvd.transport.nixl import messages
from kvd.transport.nixl.messages import Metadata, agent_of
from kvd.transport.nixl.ucx import UcxEndpoints, text_of

_GARBAGE = (ValueError, RuntimeError, MemoryError, IndexError)
"""What the bindings make of C++ exceptions that malformed metadata may cause inside NIXL."""


@dataclass(slots=True, eq=False)
class Peer:
    """`lost` is why the peer is unusable; `again` is the metadata to load once its reads have ended."""

    agent: str
    metadata: bytes
    parts: Metadata
    path: str = ""
    reads: set[int] = field(default_factory=set)
    leaving: bool = False
    lost: str = ""
    again: bytes | None = None

    @property
    def readable(self) -> bool:
        """Whether reads from it may begin."""
        return not (self.lost or self.leaving)


class Peers:
    """Peers by name. `fail_read` is called with each open read of a peer that is lost, and the reason."""

    def __init__(
        self,
        nixl: Any,
        failures: tuple[type[Exception], ...],
        endpoints: UcxEndpoints,
        *,
        emit: Callable[[AgentEvent], None],
        fail_read: Callable[[int, str], None],
    ) -> None:
        self._nixl = nixl
        self._failures = failures
        self._endpoints = endpoints
        self._emit = emit
        self._fail_read = fail_read
        self._metadata_failures: tuple[type[Exception], ...] = (*failures, *_GARBAGE)
        self._peers: dict[str, Peer] = {}

    def find(self, agent: str) -> Peer | None:
        """The peer, if reads from it may begin."""
        peer = self._peers.get(agent)
        return peer if peer is not None and peer.readable else None

    def add(self, agent: str, metadata: bytes) -> None:
        """Loads metadata and connects; answers with `PeerAdded` or `PeerFailed`."""
        parts = messages.metadata(metadata)
        named = agent_of(parts.nixl) if parts else None
        known = self._peers.get(agent)
        if parts is None or named != agent:
            about = f"about {named[:MAX_AGENT_BYTES]!r}" if named else "not NIXL's"
            self._emit(PeerFailed(agent, f"its metadata is {about}"))
            if known:
                self._lose(known, "it was replaced by unusable metadata")
        elif known is None:
            self._load(agent, metadata, parts)
        elif known.lost:
            known.again = metadata
        elif known.parts.process != parts.process:
            known.again = metadata
            self._lose(known, "the process that serves its pools was started anew")
        else:
            known.leaving = False
            self._merge(known, metadata, parts)

    def remove(self, agent: str) -> None:
        """Forgets a peer once its reads have ended."""
        peer = self._peers.get(agent)
        if peer:
            peer.leaving, peer.again = True, None
            self._forget_if_done(peer)

    def notify(self, agent: str, content: bytes) -> None:
        """Sends a message; a peer that NIXL cannot send to is lost as its reads end."""
        if self._peers.get(agent) is not None:
            with contextlib.suppress(*self._failures):
                self._nixl.send_notif(agent, content)

    def lost(self, peer: Peer, reason: str) -> None:
        """NIXL has closed the connection."""
        self._emit(PeerFailed(peer.agent, reason))
        self._lose(peer, reason)

    def read_ended(self, peer: Peer, read: int) -> None:
        """A read of `peer` has ended; after the last one, a peer that is lost or leaving is forgotten."""
        peer.reads.remove(read)
        self._forget_if_done(peer)

    def disown(self) -> list[str]:
        """Forgets all peers, for the caller to `disconnect` when their reads have ended."""
        peers, self._peers = self._peers, {}
        return list(peers)

    def disconnect(self, agent: str) -> None:
        """Has NIXL forget an agent."""
        try:
            self._nixl.remove_remote_agent(agent)
        except self._failures as error:
            if type(error).__name__ != "nixlNotFoundError":  # NIXL forgets some agents by itself
                raise

    def _load(self, agent: str, metadata: bytes, parts: Metadata) -> None:
        """Loads the metadata of an agent that NIXL does not know, and starts to connect.

        NIXL keeps a part of metadata that it refused, and then refuses that agent for good. Names are unique to an
        incarnation, so a daemon that sends such metadata has shut itself out until it is restarted.
        """
        before = self._endpoints.endpoints()
        try:
            self._nixl.add_remote_agent(parts.nixl)
            self._nixl.make_connection(agent)
        except self._metadata_failures as error:
            self.disconnect(agent)
            self._emit(PeerFailed(agent, text_of(error)))
        else:
            path = self._endpoints.path_since(before)
            self._peers[agent] = Peer(agent, metadata, parts, path)
            self._emit(PeerAdded(agent, metadata, path))

    def _merge(self, peer: Peer, metadata: bytes, parts: Metadata) -> None:
        """Loads newer metadata; what NIXL cannot merge (other memory at an old address) is loaded afresh."""
        try:
            if metadata != peer.metadata:
                self._nixl.add_remote_agent(parts.nixl)
        except self._metadata_failures as error:
            peer.again = metadata
            self._lose(peer, f"its metadata was replaced: {text_of(error)}")
        else:
            peer.metadata, peer.parts = metadata, parts
            self._emit(PeerAdded(peer.agent, metadata, peer.path))

    def _lose(self, peer: Peer, reason: str) -> None:
        """Fails the reads of a peer that is unusable, and forgets it when they have ended."""
        peer.lost = reason
        for read in list(peer.reads):
            self._fail_read(read, f"lost agent {peer.agent!r}: {reason}")
        self._forget_if_done(peer)

    def _forget_if_done(self, peer: Peer) -> None:
        if peer.reads or peer.readable or self._peers.get(peer.agent) is not peer:
            return
        del self._peers[peer.agent]
        self.disconnect(peer.agent)
        if peer.again is not None:
            self.add(peer.agent, peer.again)
