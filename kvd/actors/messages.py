"""What actors tell each other, by receiver. Time spans are in seconds; `worker` is the name a worker attached under.

Messages are not tracked by the garbage collector, but for those that carry an error: its traceback holds the frame that
delivers messages, and that frame the message.
"""

from collections.abc import Mapping

from msgspec import Struct

from kvd.errors import KvdError
from kvd.layout import CacheSpec
from kvd.protocol import peer as peer_protocol
from kvd.protocol import worker as worker_protocol
from kvd.protocol.ticket import Ticket
from kvd.protocol.types import Message

# --- things that messages are about ---------------------------------------------------------------------------------


LeaseAsk = (
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


# --- to the gateway -------------------------------------------------------------------------------------------------


class PoolLent(Struct, frozen=True, gc=False):
    """The worker on `connection` gets the pool; `descriptor` stays the pool's own.

    `tenancy` is the same as long as no other worker had the pool.
    """

    connection: int
    pool: Pool
    descriptor: int
    backing: str
    kept: bool
    tenancy: int


class PoolReturned(Struct, frozen=True, gc=False):
    """The detach on `connection` is complete."""

    connection: int


class AttachRefused(Struct, frozen=True):
    """The attach or detach on `connection` is refused."""

    connection: int
    error: KvdError


class Answer(Struct, frozen=True, gc=False):
    """An answer to one request of a worker; dropped where its session is gone."""

    worker: str
    message: Message


class Refusal(Struct, frozen=True):
    """The request `call` of a worker is refused and nothing changed."""

    worker: str
    call: int
    error: KvdError


class Backlog(Struct, frozen=True, gc=False):
    """Whether a worker leaves so many notifications unacknowledged that it gets no new requests accepted."""

    worker: str
    full: bool


class Reported(Struct, frozen=True, gc=False):
    """What an actor has to say for a status."""

    token: int
    section: str
    content: object


# --- to the pools ---------------------------------------------------------------------------------------------------


class AttachPool(Struct, frozen=True, gc=False):
    """A worker wants its pool. `descriptor` is the one it kept from an earlier daemon, or -1; the pools close it.

    `quota` bounds the bytes of all pools of `uid` together, None where nothing does.
    """

    connection: int
    worker: str
    instance: bytes
    uid: int
    spec: CacheSpec
    raw_spec: bytes
    descriptor: int
    quota: int | None


class DetachPool(Struct, frozen=True, gc=False):
    """A worker gives its pool back."""

    connection: int
    worker: str


class WorkerGone(Struct, frozen=True, gc=False):
    """The session of a worker ended without a detach."""

    worker: str
    connection: int


class Quiet(Struct, frozen=True, gc=False):
    """From leases and scheduler: nothing of theirs reads from or writes to the pool any more.

    `pool` is that of the `Quiesce` that this answers: it may come after the pool is gone, or has another epoch.
    """

    pool: Pool
    by: str


# --- to the handshake -----------------------------------------------------------------------------------------------


class PoolUp(Struct, frozen=True, gc=False):
    """To handshake, leases, scheduler: a pool is registered. `metadata` is the transport's, with the pool in it."""

    pool: Pool
    metadata: bytes


class PoolDown(Struct, frozen=True, gc=False):
    """To handshake, leases, scheduler: a pool is no more; it was quiet before."""

    pool: Pool


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


# --- to the leases --------------------------------------------------------------------------------------------------


class OfferBlocks(Struct, frozen=True, gc=False):
    """A worker's offer, its blocks checked."""

    pool: Pool
    offer: worker_protocol.Offer


class CancelRequest(Struct, frozen=True, gc=False):
    """To the scheduler, which passes it on to the leases where it knows no such pull."""

    worker: str
    cancel: worker_protocol.Cancel


class PeerAsks(Struct, frozen=True, gc=False):
    """A request of a peer that concerns leases. `peer` is who it is, whatever its run and its connection."""

    sender: bytes
    peer: str
    request: (
        peer_protocol.Claim | peer_protocol.Renew | peer_protocol.Fence | peer_protocol.Settle | peer_protocol.Release
    )


class RightsChanged(Struct, frozen=True, gc=False):
    """To the handshake: another allow-list holds; what a peer was told and may not read any more is made anew."""


class RenewPool(Struct, frozen=True, gc=False):
    """To pools: who has the keys of this worker's pool is not all trusted any more; register it anew."""

    worker: str


class PoolRenewed(Struct, frozen=True, gc=False):
    """To the gateway: the pool of a worker, which has it on, is registered anew."""

    pool: Pool


class Quiesce(Struct, frozen=True, gc=False):
    """To leases and scheduler: take no new work for a pool and answer `Quiet` when none is left.

    Offers that nobody has claimed are withdrawn, pulls are cancelled; `force` breaks what is still claimed.
    """

    pool: Pool
    force: bool = False
    why: str = "the worker is gone"


# --- to the scheduler -----------------------------------------------------------------------------------------------


class StartPull(Struct, frozen=True, gc=False):
    """A worker's pull, its ticket read and its blocks checked."""

    pool: Pool
    pull: worker_protocol.Pull
    ticket: Ticket


class PeerUp(Struct, frozen=True, gc=False):
    """A peer is ready, or has told about its pools again."""

    view: PeerView


class PeerDown(Struct, frozen=True, gc=False):
    """What was asked of this peer is lost. If `restarted` it is there, under another incarnation, and being greeted."""

    address: str
    reason: str
    restarted: bool = False


class PeerIdle(Struct, frozen=True, gc=False):
    """Nothing was asked of this peer for long; answered by `ForgetPeer` unless a pull will need it."""

    address: str


class PeerAnswers(Struct, frozen=True, gc=False):
    """An answer of a peer that concerns transfers."""

    address: str
    reply: LeaseAnswer


# --- to the completion ----------------------------------------------------------------------------------------------


class Notify(Struct, frozen=True, gc=False):
    """One notification for a worker."""

    worker: str
    item: worker_protocol.Notification


class SessionUp(Struct, frozen=True, gc=False):
    """A worker can be sent to. Another `tenancy` of its pool than before starts with an empty log."""

    worker: str
    tenancy: int


class SessionDown(Struct, frozen=True, gc=False):
    """A worker cannot be sent to."""

    worker: str


class Undelivered(Struct, frozen=True, gc=False):
    """The gateway could not send the last batch (the worker's queue is full): send again later."""

    worker: str


class Acknowledged(Struct, frozen=True, gc=False):
    """A worker has everything up to `sequence`."""

    worker: str
    sequence: int


class Forget(Struct, frozen=True, gc=False):
    """The worker detached: nothing needs to be kept for it."""

    worker: str
