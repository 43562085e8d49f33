"""Messages that several actors take, and what messages are about. Times in seconds; `worker` is an attached worker.

Messages are not tracked by the garbage collector, except those that carry an error: its traceback holds the frame that
delivers messages, and that frame the message.
"""

from collections.abc import Mapping

from msgspec import Struct

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
    stamps: int = 0
    """Address of its first stamp, 0 where it has none."""


class Report(Struct, frozen=True, gc=False):
    """To every actor: answer the gateway with `Reported`."""

    token: int


class Drain(Struct, frozen=True, gc=False):
    """To gateway, scheduler and leases: take no new work, finish what runs. To completion: nothing more will be said.

    All but the gateway call the house's `idle` when nothing of theirs is left.
    """


class Stop(Struct, frozen=True, gc=False):
    """To gateway, scheduler and leases: the grace time is over, end everything now."""


class PoolUp(Struct, frozen=True, gc=False):
    """To handshake, leases, scheduler: a pool is registered. `metadata` is the transport's, with the pool in it."""

    pool: Pool
    metadata: bytes


class PoolDown(Struct, frozen=True, gc=False):
    """To handshake, leases, scheduler: a pool is no more; it was quiet before."""

    pool: Pool


class Quiesce(Struct, frozen=True, gc=False):
    """To leases and scheduler: take no new work for a pool and answer `Quiesced` when none is left.

    Offers that nobody has claimed are withdrawn, pulls are cancelled; `force` breaks what is still claimed.
    """

    pool: Pool
    force: bool = False
    why: str = "the worker is gone"
