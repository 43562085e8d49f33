"""What the handshake actor is told."""

from msgspec import Struct

from kvd.protocol.peer import Hello, Ping, Pong, Refuse, Welcome


class NeedPeer(Struct, frozen=True, gc=False):
    """A pull needs this peer: `PeerUp` or `PeerDown` follows. `stale` is set if its pools have changed.

    `worker` is the one whose pull needs it.
    """

    address: str
    stale: bool = False
    worker: str = ""


class ExpectPeers(Struct, frozen=True, gc=False):
    """Connect to the daemons at these addresses and stay connected; those of earlier lists may be forgotten."""

    addresses: frozenset[str]


class ForgetPeer(Struct, frozen=True, gc=False):
    """No pull needs this peer; one that needs it later sends `NeedPeer` first.

    Unless it is announced again meanwhile: `announced` is that of the `PeerIdle` which this answers.
    """

    address: str
    announced: int


class HandshakeRequest(Struct, frozen=True, gc=False):
    """A peer that connected to us greets us, or asks whether we live.

    `sender` is its routing id, `key` the public key that it proved (hexadecimal, empty without CURVE). `peer` is who it
    is, whatever its run and its connection.
    """

    sender: bytes
    key: str
    peer: str
    request: Hello | Ping


class HandshakeReply(Struct, frozen=True, gc=False):
    """A peer that we connected to answers a `Hello` or a `Ping`; a `Refuse` is of the `Hello`."""

    link: int
    reply: Welcome | Pong | Refuse


class RightsChanged(Struct, frozen=True, gc=False):
    """Another allow-list holds; pools that a peer was told of and may not read any more get new keys."""
