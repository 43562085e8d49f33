"""What the handshake actor is told."""

from msgspec import Struct

from kvd.protocol.types import Message


class NeedPeer(Struct, frozen=True, gc=False):
    """The scheduler will ask this peer: `PeerUp` or `PeerDown` follows. `stale` is set where its pools have changed.

    `worker` is whose pull needs it.
    """

    address: str
    stale: bool = False
    worker: str = ""


class ExpectPeers(Struct, frozen=True, gc=False):
    """Meet the daemons at these addresses, and keep them met; nothing is due to those of earlier lists any more."""

    addresses: frozenset[str]


class AskPeer(Struct, frozen=True, gc=False):
    """Send `message` to the peer at `address`; lost where it is not ready."""

    address: str
    message: Message


class ForgetPeer(Struct, frozen=True, gc=False):
    """No pull needs this peer: whoever needs it later says `NeedPeer` first."""

    address: str


class AnswerPeer(Struct, frozen=True, gc=False):
    """Send `message` to a peer that asked us; lost where it is gone."""

    sender: bytes
    message: Message


class RightsChanged(Struct, frozen=True, gc=False):
    """To the handshake: another allow-list holds; what a peer was told and may not read any more is made anew."""
