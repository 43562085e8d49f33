"""The agents that a NIXL agent reads from: taking their metadata in, connecting, and forgetting them again.

When a peer dies NIXL raises the same error for each of its slices, once it has closed the connection, and knows the
peer no more. Its reads are failed as their slices end; a peer that is added again meanwhile waits for that, because
NIXL must forget the old connection between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvd.transport.interface import Event, PeerAdded, PeerFailed
from kvd.transport.nixl.metadata import agent_of
from kvd.transport.nixl.stamp_reader import StampReader
from kvd.transport.nixl.ucx_endpoints import UcxEndpoints

_GARBAGE = (ValueError, RuntimeError, MemoryError, IndexError)
"""What C++ exceptions become that a peer's malformed metadata may cause inside of NIXL."""


@dataclass(slots=True, eq=False)
class Peer:
    """`lost` is why the peer is of no use any more; `again` is what to load when its reads have ended."""

    agent: str
    metadata: bytes
    path: str = ""
    reads: set[int] = field(default_factory=set)
    leaving: bool = False
    lost: str = ""
    again: tuple[bytes, str | None] | None = None
    direct: bool = False
    """The last read was copied by the kernel while it was posted."""

    @property
    def readable(self) -> bool:
        """Whether reads from it may begin."""
        return not (self.lost or self.leaving)


class Peers:
    """By name. `fail_read` is told of each read of a peer that is lost, and why."""

    def __init__(
        self,
        nixl: Any,
        failures: tuple[type[Exception], ...],
        lanes: UcxEndpoints | None,
        stamp_reader: StampReader,
        *,
        emit: Callable[[Event], None],
        fail_read: Callable[[int, str], None],
    ) -> None:
        self._nixl = nixl
        self._failures = failures
        self._lanes = lanes
        self._stamp_reader = stamp_reader
        self._emit = emit
        self._fail_read = fail_read
        self._metadata_failures: tuple[type[Exception], ...] = (*failures, *_GARBAGE)
        self._peers: dict[str, Peer] = {}

    def find(self, agent: str) -> Peer | None:
        """One that reads may begin from."""
        peer = self._peers.get(agent)
        return peer if peer is not None and peer.readable else None

    def add(self, agent: str, metadata: bytes, path: str | None = None) -> None:
        """As `Transport.add_peer`; `path` is told where another agent of the process has asked for it."""
        named = agent_of(metadata)
        known = self._peers.get(agent)
        if named != agent:
            self._emit(PeerFailed(agent, f"its metadata is about {named!r}" if named else "its metadata is not NIXL's"))
            if known:
                self._lose(known, "its metadata was replaced by some of no use")
        elif known is None:
            self._load(agent, metadata, path)
        elif known.lost:
            known.again = metadata, path
        else:
            known.leaving = False
            self._merge(known, metadata)

    def remove(self, agent: str) -> None:
        """As `Transport.remove_peer`."""
        peer = self._peers.get(agent)
        if peer:
            peer.leaving, peer.again = True, None
            self._forget_if_quiet(peer)

    def lost(self, peer: Peer, reason: str) -> None:
        """NIXL has closed the connection."""
        self._emit(PeerFailed(peer.agent, reason))
        self._lose(peer, reason)

    def read_ended(self, peer: Peer, read: int) -> None:
        """One of its reads has; the last takes a peer along that is lost or leaving."""
        peer.reads.remove(read)
        self._forget_if_quiet(peer)

    def disown(self) -> list[str]:
        """Forgets all, whatever is read from them; NIXL is to `disconnect` them when their reads have ended."""
        peers, self._peers = self._peers, {}
        return list(peers)

    def disconnect(self, agent: str) -> None:
        """Has NIXL forget an agent."""
        self._stamp_reader.forget(agent)
        try:
            self._nixl.remove_remote_agent(agent)
        except self._failures as error:
            if type(error).__name__ != "nixlNotFoundError":  # NIXL forgets some agents by itself
                raise

    def _load(self, agent: str, metadata: bytes, path: str | None) -> None:
        """Takes in the metadata of an agent that NIXL does not know, and starts to connect.

        NIXL keeps a part of metadata that it refused, and then refuses that agent for good. Names are unique to an
        incarnation, so a daemon that sends such metadata has shut out itself, until it is restarted.
        """
        before = self._lanes.endpoints() if self._lanes is not None and path is None else frozenset()
        try:
            self._nixl.add_remote_agent(metadata)
            self._nixl.make_connection(agent)
        except self._metadata_failures as error:
            self.disconnect(agent)
            self._emit(PeerFailed(agent, text_of(error)))
        else:
            self._peers[agent] = Peer(agent, metadata, self._path_made_since(before) if path is None else path)
            self._emit(PeerAdded(agent, self._peers[agent].path))

    def _path_made_since(self, before: frozenset[int]) -> str:
        """The lanes of endpoints that are new; empty where nobody says."""
        if self._lanes is None:
            return ""
        return " ".join(sorted({lane for made in self._lanes.endpoints() - before for lane in self._lanes.of(made)}))

    def _merge(self, peer: Peer, metadata: bytes) -> None:
        """Takes in newer metadata; what NIXL cannot merge (other memory at an old address) is loaded afresh."""
        try:
            if metadata != peer.metadata:
                self._stamp_reader.forget(peer.agent)
                self._nixl.add_remote_agent(metadata)
        except self._metadata_failures as error:
            peer.again = metadata, None if self._lanes is not None else peer.path
            self._lose(peer, f"its metadata was replaced: {text_of(error)}")
        else:
            peer.metadata = metadata
            self._emit(PeerAdded(peer.agent, peer.path))

    def _lose(self, peer: Peer, reason: str) -> None:
        """The peer is of no use any more: fails its reads, and forgets it when they have ended."""
        peer.lost = reason
        for read in list(peer.reads):
            self._fail_read(read, f"lost agent {peer.agent!r}: {reason}")
        self._forget_if_quiet(peer)

    def _forget_if_quiet(self, peer: Peer) -> None:
        if peer.reads or peer.readable or self._peers.get(peer.agent) is not peer:
            return
        del self._peers[peer.agent]
        self.disconnect(peer.agent)
        if peer.again is not None:
            self._load(peer.agent, *peer.again)


def text_of(error: Exception) -> str:
    """An error of NIXL in one line."""
    return f"{type(error).__name__}: {error}"
