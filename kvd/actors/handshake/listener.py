"""Whom the handshake tells about peers."""

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from kvd.actors.runtime.records import PeerView


class PeerDown(Protocol):
    """Requests to the peer at `address` are lost. If `restarted`, another run of it is being greeted."""

    def __call__(self, address: str, reason: str, *, restarted: bool) -> None:
        """See above."""


class PeerListener(Struct, frozen=True):
    """Is told what becomes of the peers that pulls need."""

    up: Callable[[PeerView], None]
    """A peer is ready, or has told us about its pools again."""
    down: PeerDown
    idle: Callable[[str, int], None]
    """No pull has needed the peer at this address for long; answered by `HandshakeActor.forget` unless one will.

    The number says how often `up` was called for it; the answer repeats it.
    """
