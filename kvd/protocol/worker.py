"""Messages between a worker and its daemon.

`Attach` and `Detach` travel on the session socket, because a pool's descriptor travels with them; everything else on
ZMQ. `StatusRequest` is understood on both: an operator asks on the session socket, without a pool. Requests carry
`call`, a number of the worker's own, which an immediate `Error` answers to. A pull has no immediate answer when it is
accepted: its answer is exactly one of `Done`, `Failed` and `Cancelled`.
"""

from typing import Annotated

from msgspec import Meta

from kvd import limits
from kvd.protocol.types import (
    VERSION,
    Address,
    Code,
    Count,
    Message,
    Name,
    RequestId,
    Seconds,
    Secret,
    Spans,
    Text,
    TraceParent,
)

# --- session socket, worker to daemon -------------------------------------------------------------------------------


class Attach(Message, frozen=True, tag="attach"):
    """Asks for the pool of `worker`. One descriptor may come along: the pool's, kept while the daemon was gone.

    `instance` is drawn once per worker process: the same one attaching again continues its session (its
    notifications are sent again); another one is a successor, which gets the pool when it is quiet.
    """

    worker: Name
    instance: Annotated[bytes, Meta(min_length=16, max_length=16)]
    spec: Annotated[bytes, Meta(max_length=limits.MAX_SPEC_BYTES)]
    """An encoded `kvd.layout.CacheSpec`, which also says how many bytes the pool has."""
    version: int = VERSION


class Detach(Message, frozen=True, tag="detach"):
    """Gives the pool back. Answered with `Detached` when nothing reads from or writes to it any more."""


# --- session socket, daemon to worker -------------------------------------------------------------------------------


class Attached(Message, frozen=True, tag="attached"):
    """The pool is lent. `session` is the worker's routing id on `endpoint` from now on.

    Two descriptors come along: the pool's, and one of the daemon's process (a pidfd), which becomes readable when that
    has ended: only then does it write to the pool no more, whatever became of its sockets.
    """

    session: Annotated[bytes, Meta(min_length=16, max_length=16)]
    endpoint: Address
    daemon: Name
    incarnation: Count
    address: Address
    """Where peers reach this daemon: what a ticket names."""
    pool_bytes: Count
    backing: str
    """What the pool's memory is made of: `hugetlb`, `thp`, `plain` (or a kind of device memory)."""
    kept: bool
    """Whether the bytes of an earlier session are still in it."""
    version: int = VERSION
    pool: Count = 0
    """Another number for another pool of this incarnation, and for the same one where another worker had it since: then
    everything that was asked for has ended, and notifications are numbered from 1 again."""


class Detached(Message, frozen=True, tag="detached"):
    """The pool is gone."""


class Refused(Message, frozen=True, tag="refused"):
    """The session request was refused; nothing changed."""

    code: Code
    text: Text


# --- ZMQ, worker to daemon ------------------------------------------------------------------------------------------


class Offer(Message, frozen=True, tag="offer"):
    """Blocks of a request may be read by whoever holds the ticket, for `ttl` seconds or longer while claimed.

    `tokens` is the length of the sequence whose KV the blocks hold. The worker must not write to the blocks until
    `Released` names the offer. `secret` is drawn anew for each offer: the ticket carries it, and who has it may read.
    """

    call: Count
    offer: RequestId
    tokens: Count
    spans: Spans
    ttl: Seconds
    secret: Secret
    consumers: Annotated[int, Meta(ge=0, le=limits.MAX_CONSUMERS)] = 1
    """Consumers, with all their ranks, that finish before the offer ends; 0 for any number, until `ttl` or a cancel."""


class Pull(Message, frozen=True, tag="pull"):
    """Bring the blocks at these positions, from whoever made `ticket`, into these blocks of the worker's own pool.

    Groups and positions that the worker holds already are left out. `timeout` is in seconds from arrival.
    """

    call: Count
    request: RequestId
    ticket: Annotated[str, Meta(max_length=limits.MAX_MESSAGE_BYTES)]
    spans: Spans
    timeout: Seconds
    traceparent: TraceParent | None = None
    """The worker's span, where it traces this request."""
    consumer: Annotated[str, Meta(max_length=limits.MAX_REQUEST_ID_BYTES)] = ""
    """Names the consumer, the same for all ranks of an engine that pull it together; empty: `request` does."""


class Cancel(Message, frozen=True, tag="cancel"):
    """Stop a pull, or withdraw an offer. Its outcome still comes: a pull may have been done already."""

    call: Count
    request: RequestId


class Acknowledge(Message, frozen=True, tag="acknowledge"):
    """Every notification up to and including `sequence` was received and need not be kept."""

    sequence: Count


class StatusRequest(Message, frozen=True, tag="status"):
    """Asks for a `Status`."""

    call: Count


Request = Offer | Pull | Cancel | Acknowledge | StatusRequest

# --- ZMQ, daemon to worker ------------------------------------------------------------------------------------------


class Offered(Message, frozen=True, tag="offered"):
    """The offer stands. `ticket` is for the consumer's `Pull`: text, of one rank (`kvd.protocol.ticket.join`)."""

    call: Count
    ticket: str


class Error(Message, frozen=True, tag="error"):
    """The request `call` was refused and nothing changed. `call` is 0 where the message could not be read."""

    call: Count
    code: Code
    text: Text


class Done(Message, frozen=True, tag="done"):
    """Every byte of the pull landed while every lease was held."""

    request: RequestId


class Failed(Message, frozen=True, tag="failed"):
    """The pull failed. Its blocks hold nothing of use, and if `quarantined` must not be reused before `Freed`."""

    request: RequestId
    code: Code
    text: Text
    quarantined: bool


class Cancelled(Message, frozen=True, tag="cancelled"):
    """The pull was cancelled in time; `quarantined` as for `Failed`."""

    request: RequestId
    quarantined: bool


class Freed(Message, frozen=True, tag="freed"):
    """Nothing can write to the blocks of this failed or cancelled pull any more."""

    request: RequestId


class Released(Message, frozen=True, tag="released"):
    """Nobody will read the blocks of this offer and be told `done`: they are the worker's again.

    `reason` is `read` (as many consumers as were offered it have finished), `expired`, `withdrawn` or `shutdown`.
    """

    offer: RequestId
    reason: str


Notification = Done | Failed | Cancelled | Freed | Released


class Notifications(Message, frozen=True, tag="notifications"):
    """A batch: `items[i]` has sequence number `first + i`. Sent again on the next attach until acknowledged."""

    first: Count
    items: tuple[Notification, ...]


class Status(Message, frozen=True, tag="status"):
    """The daemon at one moment, as a JSON document (`kvd.protocol.status` has its types)."""

    call: Count
    report: bytes


Reply = Offered | Error | Notifications | Status
SessionRequest = Attach | Detach | StatusRequest
SessionReply = Attached | Detached | Refused | Status
