"""Messages that several actors take, and records that messages carry. `worker` is the name of an attached worker.

The garbage collector does not track messages, except those that carry an error: its traceback holds the frame that
delivers messages, and that frame holds the message.
"""

from collections.abc import Mapping

from msgspec import Struct

from kvd.actors.runtime.blocks import BlocksInUse
from kvd.layout import CacheSpec
from kvd.protocol import peer as peer_protocol

LeaseRequest = (
    peer_protocol.Claim | peer_protocol.Renew | peer_protocol.Fence | peer_protocol.Settle | peer_protocol.Release
)
LeaseAnswer = (
    peer_protocol.Grant | peer_protocol.Refuse | peer_protocol.Held | peer_protocol.Broken | peer_protocol.Settled
)


class Pool(Struct, frozen=True, gc=False):
    """A pool of this daemon, registered with the transport. `base` is an address, `size` bytes."""

    id: int
    worker: str
    epoch: int
    base: int
    size: int
    spec: CacheSpec
    raw_spec: bytes
    blocks: BlocksInUse
    uid: int
    """The user that it belongs to."""


class PeerPool(Struct, frozen=True, gc=False):
    """A pool of a peer."""

    epoch: int
    base: int
    size: int
    spec: CacheSpec


class PeerView(Struct, frozen=True, gc=False):
    """A peer that is ready: its transport agent and its pools by name."""

    address: str
    daemon: str
    incarnation: int
    agent: str
    pools: Mapping[str, PeerPool]
    same_host: bool = False
    """Whether its transport has no part in reads from it."""
    stamps: int = 0
    """Address of its first stamp; 0 if it has none, or if its process cannot be read."""


class Report(Struct, frozen=True, gc=False):
    """To every actor: send the gateway a `Reported`."""

    token: int


class Drain(Struct, frozen=True, gc=False):
    """To gateway, scheduler and leases: take no new work, finish what runs. To completion: no notification follows.

    All but the gateway call `ActorContext.idle` when they have nothing left to do.
    """


class Stop(Struct, frozen=True, gc=False):
    """To gateway, scheduler and leases: the grace time is over; end everything now."""


class PoolUp(Struct, frozen=True, gc=False):
    """To handshake, leases, scheduler: a pool is registered. `metadata` is the transport's, which includes the pool."""

    pool: Pool
    metadata: bytes


class PoolDown(Struct, frozen=True, gc=False):
    """To handshake, leases, scheduler: a pool is gone; it was quiet."""

    pool: Pool


class Quiesce(Struct, frozen=True, gc=False):
    """To leases and scheduler: take no new work for a pool, and answer `Quiesced` when none is left.

    Unclaimed offers are withdrawn and pulls are cancelled; `force` breaks claimed offers too.
    """

    pool: Pool
    force: bool = False
    why: str = "the worker is gone"
