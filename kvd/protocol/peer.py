"""Messages between two daemons: the consumer's requests, the producer's answers.

The consumer's daemon connects; answers return over the same connection. A request may be sent twice (if the answer was
lost) and gets the same answer both times. The consumer picks the `claim` numbers and uses none twice in one
incarnation.
"""

from typing import Annotated

from msgspec import Meta

from kvd import limits
from kvd.protocol.types import VERSION, Code, Count, Message, Name, Proof, RequestId, Seconds, Spans, Text, TraceParent

# --- consumer to producer -------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """Introduces the consumer. Answered by `Welcome`, or by `Refuse` with claim 0 if the versions differ.

    While the producer's transport to other hosts starts again, a consumer of another host is answered by a `Pong` of
    number 0, and says hello again with its next heartbeat; if that transport does not come back, by `Refuse`.
    """

    daemon: Name
    incarnation: Count
    version: int = VERSION
    host: Annotated[str, Meta(max_length=limits.MAX_NAME_BYTES)] = ""
    """Identifies the running kernel, as in `Welcome`."""


class Claim(Message, frozen=True, tag="claim"):
    """Asks to read an offer. Answered by `Grant` or `Refuse`, later if the offer may still arrive.

    `consumer` names the consuming engine's request, `readers` is how many of its ranks will read this offer, and
    `reader` which of them this is: the consumer has finished when all have. The claim lapses `ttl` seconds after it or
    its last `Renew` arrived.
    """

    claim: Count
    pool: Name
    offer: RequestId
    incarnation: Count
    """The producer's incarnation according to the ticket; `generation` is the lease's. 0 if the ticket has none."""
    generation: Count
    proof: Proof
    consumer: RequestId
    reader: Annotated[int, Meta(ge=0, lt=limits.MAX_RANKS)]
    readers: Annotated[int, Meta(ge=1, le=limits.MAX_RANKS)]
    ttl: Seconds
    serve: bool = True
    """Whether the producer's transport takes part in the read and must answer promptly; not on the same host."""
    traceparent: TraceParent | None = None
    """The consumer's trace span; None if it does not trace this transfer."""


class Renew(Message, frozen=True, tag="renew"):
    """These claims are still wanted. Answered by one `Broken` if some are no longer held, else not at all."""

    claims: Annotated[tuple[Count, ...], Meta(max_length=limits.MAX_RENEWALS)]


class Follow(Message, frozen=True, tag="follow"):
    """Asks what a claimed offer that grows has beyond its first `seen` parts.

    Answered by one `Grown` as soon as there is something, which may be much later, or by `Broken`. The consumer asks
    again when it has read that: what comes meanwhile is told together, but 64 KiB of block ids at most.
    """

    claim: Count
    seen: Count


class Fence(Message, frozen=True, tag="fence"):
    """Asks if the lease was held under this generation until now, after the last byte landed.

    Answered by `Held`, which also ends the claim, or by `Broken`.
    """

    claim: Count
    generation: Count
    unclaimed: Claim | None = None
    """The claim itself, if it was not sent before: the ticket named the generation, so no grant was needed."""
    proof: Proof | None = None
    """Over all that was read, if the offer grew; None if the claim's is, as the ticket named all."""


class Settle(Message, frozen=True, tag="settle"):
    """Reports readers that have finished; the leases' stamps, read after the last byte, proved their reads.

    A fence of generation 0 is of a reader that will not come, of whose claim no grant is known: if its offer is not
    there yet, it counts when that comes. Answered by `Settled`, whatever has become of the leases.
    """

    fences: Annotated[tuple[Fence, ...], Meta(max_length=limits.MAX_SETTLED)]


class Release(Message, frozen=True, tag="release"):
    """The claim is no longer wanted. If `finished`, this reader will not claim again."""

    claim: Count
    finished: bool


class Ping(Message, frozen=True, tag="ping"):
    """Checks that the producer lives and is the same incarnation."""

    number: Count


LeaseRequest = Claim | Renew | Follow | Fence | Settle | Release
PeerRequest = Hello | LeaseRequest | Ping

# --- producer to consumer -------------------------------------------------------------------------------------------


class PoolInfo(Message, frozen=True):
    """A pool as a peer needs it: where it starts in the producer's address space, its length, its layout."""

    pool: Name
    epoch: Count
    """Changes with the pool: new memory, a new layout or a new registration."""
    base: Annotated[bytes, Meta(min_length=8, max_length=8)]
    """Address in the daemon's process, unsigned 64-bit little-endian."""
    size: Count
    spec: Annotated[bytes, Meta(max_length=limits.MAX_SPEC_BYTES)]


class Welcome(Message, frozen=True, tag="welcome"):
    """Introduces the producer, with its transport's metadata and registered pools."""

    daemon: Name
    incarnation: Count
    agent: Annotated[str, Meta(max_length=limits.MAX_AGENT_BYTES)]
    """Begins with `<daemon>#`."""
    metadata: Annotated[bytes, Meta(max_length=limits.MAX_METADATA_BYTES)]
    pools: Annotated[tuple[PoolInfo, ...], Meta(max_length=limits.MAX_POOLS)]
    version: int = VERSION
    host: Annotated[str, Meta(max_length=limits.MAX_NAME_BYTES)] = ""
    """Identifies the running kernel: the consumer expects a fast path to daemons on its own."""
    stamps: Annotated[bytes, Meta(min_length=8, max_length=8)] = bytes(8)
    """Address of the first stamp in the daemon's process, unsigned 64-bit little-endian; 0 if it has none."""
    starts: Count = 0
    """How often its transport to other hosts has been started again: each time its keys are others."""


class Grant(Message, frozen=True, tag="grant"):
    """The claim holds the lease of this generation; the blocks lie in this epoch of the pool."""

    claim: Count
    generation: Count
    epoch: Count
    incarnation: Count


class Grown(Message, frozen=True, tag="grown"):
    """What a claimed offer holds beyond its first `seen` parts, up to its part number `parts`.

    The first `tokens` tokens of the sequence are complete in the blocks of all these parts together. If `closed`, these
    are all there will be, and the lease's stamp lies in the word number `stamp`, if that is not 0.
    """

    claim: Count
    seen: Count
    parts: Count
    tokens: Count
    spans: Spans
    closed: bool
    stamp: Annotated[int, Meta(ge=0, le=limits.MAX_STAMPS)] = 0


class Refuse(Message, frozen=True, tag="refuse"):
    """The claim (or, with claim 0, the hello) is refused."""

    claim: Count
    code: Code
    text: Text


class Held(Message, frozen=True, tag="held"):
    """The lease was held until the fence arrived; this reader has finished."""

    claim: Count


class Broken(Message, frozen=True, tag="broken"):
    """These claims are not held (any more): bytes read under them must not be used."""

    claims: Annotated[tuple[Count, ...], Meta(max_length=limits.MAX_RENEWALS)]
    code: Code
    text: Text


class Settled(Message, frozen=True, tag="settled"):
    """The producer has recorded that these readers finished."""

    claims: Annotated[tuple[Count, ...], Meta(max_length=limits.MAX_SETTLED)]


class Pong(Message, frozen=True, tag="pong"):
    """Answers `Ping`; a new incarnation means that every claim is gone."""

    number: Count
    incarnation: Count
    starts: Count = 0
    """As in `Welcome`."""


LeaseAnswer = Grant | Grown | Refuse | Held | Broken | Settled
PeerReply = Welcome | LeaseAnswer | Pong
