"""Messages between a worker and its daemon.

`Attach` and `Detach` use the session socket, because a pool's descriptor travels with them; everything else uses ZMQ.
`StatusRequest` works on both: operators send it on the session socket, without a pool. Requests carry `call`, a number
that the worker picks; an immediate `Error` names it. An accepted pull has no immediate answer: it ends in exactly one
of `Done`, `Failed` and `Cancelled`.
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
    """Asks for the pool of `worker`. The pool's descriptor may come along, if it was kept while the daemon was gone.

    `instance` is drawn once per worker process. Attaching again with the same one continues the session
    (notifications are sent again); a new one is a successor, which gets the pool once nothing uses it.
    """

    worker: Name
    instance: Annotated[bytes, Meta(min_length=16, max_length=16)]
    spec: Annotated[bytes, Meta(max_length=limits.MAX_SPEC_BYTES)]
    """An encoded `kvd.layout.CacheSpec`, which also gives the pool's size."""
    version: int = VERSION


class Detach(Message, frozen=True, tag="detach"):
    """Gives the pool back. Answered by `Detached` once nothing reads from or writes to it."""


class End(Message, frozen=True, tag="end"):
    """Ends the pool of a worker that is gone, for its user or the daemon's; of a session without a pool.

    Answered by `Detached` once nothing reads from or writes to it.
    """

    worker: Name


# --- session socket, daemon to worker -------------------------------------------------------------------------------


class Attached(Message, frozen=True, tag="attached"):
    """The pool is lent. `session` is the worker's routing id on `endpoint` from now on.

    Two descriptors come along: the pool's, and one on which poll(2) reports an event, of any kind, when the daemon's
    processes have ended; until then they may write to the pool, even if its sockets are closed. It is a pidfd if there
    is but one process, else the end of a pipe.
    """

    session: Annotated[bytes, Meta(min_length=16, max_length=16)]
    endpoint: Address
    daemon: Name
    incarnation: Count
    address: Address
    """Where peers reach this daemon; tickets name it."""
    pool_bytes: Count
    backing: str
    """What the pool's memory is made of: `hugetlb`, `thp`, `plain`; `cuda` is a GPU's memory."""
    kept: bool
    """Whether the pool still has the bytes of an earlier session."""
    version: int = VERSION
    tenancy: Count = 0
    """A number for this worker's time with the pool, within this incarnation. If it is another one, somebody else had
    the pool since, or it is a new pool: every earlier request has ended, and notifications begin at 1 again."""
    device: Annotated[str, Meta(max_length=64)] = ""
    """The UUID of the GPU that has the pool, as `nvidia-smi -L` shows it (`GPU-...`); empty for host memory. Compare no
    ordinals: CUDA_VISIBLE_DEVICES changes them."""
    pool_length: Count = 0
    """Bytes of the mapping behind the descriptor, `pool_bytes` and more. A GPU's memory is mapped at exactly this
    length, as its descriptor does not tell; a memfd does."""


class Detached(Message, frozen=True, tag="detached"):
    """The pool was taken back."""


class Refused(Message, frozen=True, tag="refused"):
    """The session request was refused; nothing changed."""

    code: Code
    text: Text


# --- ZMQ, worker to daemon ------------------------------------------------------------------------------------------


class Offer(Message, frozen=True, tag="offer"):
    """Lets whoever holds the ticket read these blocks, for `ttl` seconds or longer while claimed.

    `tokens` is the length of the sequence whose KV the blocks hold. The worker must not write to the blocks until
    `Released` names the offer. `secret` is drawn for each offer; the ticket carries it, and whoever has it may read.
    """

    call: Count
    offer: RequestId
    tokens: Count
    spans: Spans
    ttl: Seconds
    secret: Secret
    consumers: Annotated[int, Meta(ge=0, le=limits.MAX_CONSUMERS)] = 1
    """The offer ends when this many consumers have finished, with all their ranks; 0: only by `ttl` or a cancel."""
    grows: bool = False
    """It is only opened: it has no tokens and no `spans` yet, and `Extend` adds them. It ends with the worker's session
    unless it is closed by then. `ttl` begins anew with each extension, and with the close."""


class Extend(Message, frozen=True, tag="extend"):
    """Adds blocks to an offer that grows. Answered by `Extended`.

    From now on the first `tokens` tokens of the sequence are complete in its blocks: readers may have them at once.
    Tokens and positions go on where they ended before; the last block may be filled up later, behind `tokens`. If it
    `closes`, these are the last ones, and readers are done when they have all. Groups that do not attend to every token
    are named only then: until it ends, a prefill frees and rewrites their blocks.
    """

    call: Count
    offer: RequestId
    tokens: Count
    spans: Spans
    closes: bool = False


class Pull(Message, frozen=True, tag="pull"):
    """Reads the blocks that `ticket` offers at these positions into these blocks of the worker's own pool.

    Leave out groups and positions that the worker already holds. `timeout` is in seconds from arrival.
    """

    call: Count
    request: RequestId
    ticket: Annotated[str, Meta(max_length=limits.MAX_MESSAGE_BYTES)]
    spans: Spans
    timeout: Seconds
    traceparent: TraceParent | None = None
    """The worker's trace span; None if it does not trace this request."""
    consumer: Annotated[str, Meta(max_length=limits.MAX_REQUEST_ID_BYTES)] = ""
    """Names the consumer, the same for all ranks of an engine that pull together; if empty, `request` does."""
    hold: bool = False
    """Reads nothing, and has no `spans`: the offer outlives its ttl until this is cancelled, `timeout` is over, or the
    worker's session ends. A cancel says that this consumer has finished; what it pulls meanwhile counts as the same."""


class Cancel(Message, frozen=True, tag="cancel"):
    """Stops a pull or withdraws an offer. Its outcome still comes: a pull may already be done."""

    call: Count
    request: RequestId


class Acknowledge(Message, frozen=True, tag="acknowledge"):
    """The daemon may forget every notification up to and including `sequence`."""

    sequence: Count


class StatusRequest(Message, frozen=True, tag="status"):
    """Asks for a `Status`."""

    call: Count


Request = Offer | Extend | Pull | Cancel | Acknowledge | StatusRequest

# --- ZMQ, daemon to worker ------------------------------------------------------------------------------------------


class Offered(Message, frozen=True, tag="offered"):
    """The offer is active. `ticket`, text of one rank (`kvd.protocol.ticket.join`), is for the consumer's `Pull`."""

    call: Count
    ticket: str


class Extended(Message, frozen=True, tag="extended"):
    """The offer has these blocks, too."""

    call: Count


class Error(Message, frozen=True, tag="error"):
    """The request `call` was refused and nothing changed. `call` is 0 if the message could not be read."""

    call: Count
    code: Code
    text: Text
    upcoming: Count = 0
    """For a refused `Cancel`: whatever the request still has to be told has a lower sequence number; 0: not said."""


class Done(Message, frozen=True, tag="done"):
    """Every byte of the pull landed while every lease was held."""

    request: RequestId


class Failed(Message, frozen=True, tag="failed"):
    """The pull failed. Its blocks hold nothing useful; if `quarantined`, do not reuse them before `Freed`."""

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
    """The offer has ended, and no later read of its blocks will count as done: they are the worker's again.

    `reason` is `read` (as many consumers as it was for have finished), `expired`, `withdrawn` or `shutdown`.
    """

    offer: RequestId
    reason: str


Notification = Done | Failed | Cancelled | Freed | Released


class Notifications(Message, frozen=True, tag="notifications"):
    """A batch: `items[i]` has sequence number `first + i`. Each attach sends it again until it is acknowledged."""

    first: Count
    items: tuple[Notification, ...]


class Status(Message, frozen=True, tag="status"):
    """The daemon at one moment, as a JSON document (`kvd.protocol.status` has its types)."""

    call: Count
    report: bytes


Reply = Offered | Extended | Error | Notifications | Status
SessionRequest = Attach | Detach | End | StatusRequest
SessionReply = Attached | Detached | Refused | Status
