"""Has each peer's metadata examined before NIXL loads it: some of it kills the process that does."""

from collections.abc import Callable
from functools import partial

from msgspec import Struct

Examine = Callable[[str, bytes, bytes, Callable[[str], None]], None]
"""Takes an agent, its previous metadata (may be empty) and its new; reports later why the new is unusable, or ""."""


def accept(_agent: str, _known: bytes, _metadata: bytes, done: Callable[[str], None]) -> None:
    """Finds no fault with any metadata."""
    done("")


class _Peer(Struct, eq=False):
    """Metadata of a peer, as it was added last."""

    metadata: bytes
    examined: bool = False


class ExaminedPeers:
    """Calls `load(agent, metadata)` for metadata without a fault, `refuse(agent, fault)` for any other."""

    def __init__(
        self, examine: Examine, *, load: Callable[[str, bytes], None], refuse: Callable[[str, str], None]
    ) -> None:
        self._examine = examine
        self._load = load
        self._refuse = refuse
        self._peers: dict[str, _Peer] = {}

    def add(self, agent: str, metadata: bytes) -> None:
        """Examines metadata, unless it is what was loaded last; what is said of older metadata is not heard."""
        known, peer = self._peers.get(agent), _Peer(metadata)
        self._peers[agent] = peer
        if known is not None and known.examined and known.metadata == metadata:
            self._examined(agent, peer, "")
        else:
            self._examine(agent, known.metadata if known else b"", metadata, partial(self._examined, agent, peer))

    def forget(self, agent: str) -> None:
        """Forgets a peer that is removed or lost."""
        self._peers.pop(agent, None)

    def forget_all(self) -> None:
        """Loads nothing any more."""
        self._peers.clear()

    def _examined(self, agent: str, peer: _Peer, fault: str) -> None:
        if self._peers.get(agent) is not peer:
            return
        if fault:
            self.forget(agent)
            self._refuse(agent, fault)
        else:
            peer.examined = True
            self._load(agent, peer.metadata)
