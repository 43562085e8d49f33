"""What actors tell each other, by receiver. Time spans are in seconds; `worker` is the name a worker attached under."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvd.errors import KvdError
from kvd.layout import CacheSpec
from kvd.protocol import peer as peer_protocol
from kvd.protocol import worker as worker_protocol
from kvd.protocol.ticket import Ticket
from kvd.protocol.types import Message

# --- things that messages are about ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of this daemon, registered with the transport. `base` is an address, `size` bytes."""

    id: int
    worker: str
    epoch: int
    base: int
    size: int
    spec: CacheSpec
    raw_spec: bytes


@dataclass(frozen=True, slots=True)
class PeerPool:
    """A pool of a peer."""

    epoch: int
    base: int
    size: int
    spec: CacheSpec


@dataclass(frozen=True, slots=True)
class PeerView:
    """A peer that is ready: its transport agent and its pools by name."""

    address: str
    daemon: str
    incarnation: int
    agent: str
    pools: Mapping[str, PeerPool]


@dataclass(frozen=True, slots=True)
class Report:
    """To every actor: answer the gateway with `Reported`."""

    token: int


@dataclass(frozen=True, slots=True)
class Drain:
    """To gateway, scheduler and leases: take no new work, finish what runs; answer the supervisor's `on_idle`."""


@dataclass(frozen=True, slots=True)
class Stop:
    """To gateway, scheduler and leases: the grace time is over, end everything now."""


# --- to the gateway -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolLent:
    """The worker on `connection` gets the pool; `descriptor` stays the pool's own."""

    connection: int
    pool: Pool
    instance: bytes
    descriptor: int
    backing: str
    kept: bool


@dataclass(frozen=True, slots=True)
class PoolReturned:
    """The detach on `connection` is complete."""

    connection: int


@dataclass(frozen=True, slots=True)
class AttachRefused:
    """The attach or detach on `connection` is refused."""

    connection: int
    error: KvdError


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to one request of a worker; dropped where its session is gone."""

    worker: str
    message: Message


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request `call` of a worker is refused and nothing changed."""

    worker: str
    call: int
    error: KvdError


@dataclass(frozen=True, slots=True)
class Backlog:
    """Whether a worker leaves so many notifications unacknowledged that it gets no new requests accepted."""

    worker: str
    full: bool


@dataclass(frozen=True, slots=True)
class Reported:
    """What an actor has to say for a status."""

    token: int
    section: str
    content: object


# --- to the pools ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttachPool:
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


@dataclass(frozen=True, slots=True)
class DetachPool:
    """A worker gives its pool back."""

    connection: int
    worker: str


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """The session of a worker ended without a detach."""

    worker: str
    connection: int


@dataclass(frozen=True, slots=True)
class Quiet:
    """From leases and scheduler: nothing of theirs reads from or writes to the pool any more."""

    pool: int
    by: str


# --- to the handshake -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolUp:
    """To handshake, leases, scheduler: a pool is registered. `metadata` is the transport's, with the pool in it."""

    pool: Pool
    metadata: bytes


@dataclass(frozen=True, slots=True)
class PoolDown:
    """To handshake, leases, scheduler: a pool is no more; it was quiet before."""

    pool: Pool


@dataclass(frozen=True, slots=True)
class NeedPeer:
    """The scheduler will ask this peer: `PeerUp` or `PeerDown` follows. `stale` is set where its pools have changed."""

    address: str
    stale: bool = False


@dataclass(frozen=True, slots=True)
class ExpectPeers:
    """Meet the daemons at these addresses, and keep them met; nothing is due to those of earlier lists any more."""

    addresses: frozenset[str]


@dataclass(frozen=True, slots=True)
class AskPeer:
    """Send `message` to the peer at `address`; lost where it is not ready."""

    address: str
    message: Message


@dataclass(frozen=True, slots=True)
class AnswerPeer:
    """Send `message` to a peer that asked us; lost where it is gone."""

    sender: bytes
    message: Message


# --- to the leases --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OfferBlocks:
    """A worker's offer, its blocks checked."""

    pool: Pool
    offer: worker_protocol.Offer


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """To the scheduler, which passes it on to the leases where it knows no such pull."""

    worker: str
    cancel: worker_protocol.Cancel


@dataclass(frozen=True, slots=True)
class PeerAsks:
    """A request of a peer that concerns leases."""

    sender: bytes
    request: peer_protocol.Claim | peer_protocol.Renew | peer_protocol.Fence | peer_protocol.Release


@dataclass(frozen=True, slots=True)
class Quiesce:
    """To leases and scheduler: take no new work for a pool and answer `Quiet` when none is left.

    Offers that nobody has claimed are withdrawn, pulls are cancelled; `force` breaks what is still claimed.
    """

    pool: int
    force: bool = False


# --- to the scheduler -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartPull:
    """A worker's pull, its ticket read and its blocks checked."""

    pool: Pool
    pull: worker_protocol.Pull
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A peer is ready, or has told about its pools again."""

    view: PeerView


@dataclass(frozen=True, slots=True)
class PeerDown:
    """What was asked of this peer is lost. If `restarted` it is there, under another incarnation, and being greeted."""

    address: str
    reason: str
    restarted: bool = False


@dataclass(frozen=True, slots=True)
class PeerAnswers:
    """An answer of a peer that concerns transfers."""

    address: str
    reply: peer_protocol.Grant | peer_protocol.Refuse | peer_protocol.Held | peer_protocol.Broken


# --- to the completion ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Notify:
    """One notification for a worker."""

    worker: str
    item: worker_protocol.Notification


@dataclass(frozen=True, slots=True)
class SessionUp:
    """A worker can be sent to. Another `instance` than before starts with an empty log."""

    worker: str
    instance: bytes


@dataclass(frozen=True, slots=True)
class SessionDown:
    """A worker cannot be sent to."""

    worker: str


@dataclass(frozen=True, slots=True)
class Undelivered:
    """The gateway could not send the last batch (the worker's queue is full): send again later."""

    worker: str


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A worker has everything up to `sequence`."""

    worker: str
    sequence: int


@dataclass(frozen=True, slots=True)
class Forget:
    """The worker detached: nothing needs to be kept for it."""

    worker: str
