"""Messages between two daemons: the consumer's asks, the producer's answers.

The consumer's daemon connects; answers travel back over the same connection. Every ask may be sent twice (after a
lost answer) and is answered the same both times. `claim` is a number of the consumer's own, never used twice within
one incarnation.
"""

from typing import Annotated

from msgspec import Meta

from kvd import limits
from kvd.protocol.types import VERSION, Code, Count, Message, Name, Proof, RequestId, Seconds, Text, TraceParent

# --- consumer to producer -------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """Who is asking. Answered by `Welcome`, or by `Refuse` with claim 0 where the versions differ."""

    daemon: Name
    incarnation: Count
    version: int = VERSION


class Claim(Message, frozen=True, tag="claim"):
    """Asks to read an offer. Waits at the producer where the offer may yet come; else `Grant` or `Refuse`.

    `consumer` names the consuming engine's request, `readers` is how many of its ranks will read this offer and
    `reader` which of them asks: it has finished when all have. The claim lapses `ttl` seconds after it or its last
    `Renew` arrived.
    """

    claim: Count
    pool: Name
    offer: RequestId
    incarnation: Count
    """The producer's incarnation that the ticket names, and `generation` the lease's; 0 where it does not say."""
    generation: Count
    proof: Proof
    consumer: RequestId
    reader: Annotated[int, Meta(ge=0, lt=limits.MAX_RANKS)]
    readers: Annotated[int, Meta(ge=1, le=limits.MAX_RANKS)]
    ttl: Seconds
    serve: bool = True
    """Whether the producer's transport has a part in the read and must answer promptly; not so on the same host."""
    traceparent: TraceParent | None = None
    """The consumer's span, where it traces this transfer."""


class Renew(Message, frozen=True, tag="renew"):
    """These claims are still wanted. Answered only where some are not held any more, by one `Broken`."""

    claims: Annotated[tuple[Count, ...], Meta(max_length=limits.MAX_RENEWALS)]


class Fence(Message, frozen=True, tag="fence"):
    """The last byte has landed: was the lease held under this generation until now? `Held` (and let go) or `Broken`."""

    claim: Count
    generation: Count
    unclaimed: Claim | None = None
    """The claim itself, where the ticket named the generation and no grant was waited for."""


class Settle(Message, frozen=True, tag="settle"):
    """Reads whose leases' stamps were found after the last byte: nothing is asked, but each reader has finished.

    Answered by `Settled`, whatever has become of the leases meanwhile.
    """

    fences: Annotated[tuple[Fence, ...], Meta(max_length=limits.MAX_SETTLED)]


class Release(Message, frozen=True, tag="release"):
    """The claim is not wanted any more. Where `finished`, this reader will not come again; else it might."""

    claim: Count
    finished: bool


class Ping(Message, frozen=True, tag="ping"):
    """Are you there, and are you still the same?"""

    number: Count


PeerRequest = Hello | Claim | Renew | Fence | Settle | Release | Ping

# --- producer to consumer -------------------------------------------------------------------------------------------


class PoolInfo(Message, frozen=True):
    """A pool as a peer needs it: where it starts in the producer's address space, its length, its layout."""

    pool: Name
    epoch: Count
    """Changes whenever the pool is another one than before: new memory, new layout or a new registration."""
    base: Annotated[bytes, Meta(min_length=8, max_length=8)]
    """Address in the daemon, unsigned 64-bit little-endian."""
    size: Count
    spec: Annotated[bytes, Meta(max_length=limits.MAX_SPEC_BYTES)]


class Welcome(Message, frozen=True, tag="welcome"):
    """Who answers, the transport's metadata and the pools it registered."""

    daemon: Name
    incarnation: Count
    agent: Annotated[str, Meta(max_length=2 * limits.MAX_NAME_BYTES)]
    """Begins with `<daemon>#`."""
    metadata: Annotated[bytes, Meta(max_length=limits.MAX_METADATA_BYTES)]
    pools: Annotated[tuple[PoolInfo, ...], Meta(max_length=limits.MAX_POOLS)]
    version: int = VERSION
    host: Annotated[str, Meta(max_length=limits.MAX_NAME_BYTES)] = ""
    """The same for all daemons on one running kernel: the consumer expects a fast path to those on its own."""
    stamps: Annotated[bytes, Meta(min_length=8, max_length=8)] = bytes(8)
    """Address of the first stamp in the daemon, unsigned 64-bit little-endian; 0 where it has none."""


class Grant(Message, frozen=True, tag="grant"):
    """The claim holds the lease of this generation; the blocks lie in the pool of this epoch of this incarnation."""

    claim: Count
    generation: Count
    epoch: Count
    incarnation: Count


class Refuse(Message, frozen=True, tag="refuse"):
    """The claim (or, with claim 0, the hello) is refused."""

    claim: Count
    code: Code
    text: Text


class Held(Message, frozen=True, tag="held"):
    """The lease was held without a break until the fence arrived; this reader has finished."""

    claim: Count


class Broken(Message, frozen=True, tag="broken"):
    """These claims are not held (any more): what was read under them must not be used."""

    claims: Annotated[tuple[Count, ...], Meta(max_length=limits.MAX_RENEWALS)]
    code: Code
    text: Text


class Settled(Message, frozen=True, tag="settled"):
    """These readers are known to have finished."""

    claims: Annotated[tuple[Count, ...], Meta(max_length=limits.MAX_SETTLED)]


class Pong(Message, frozen=True, tag="pong"):
    """Answers `Ping`; another incarnation than before means that every claim is gone."""

    number: Count
    incarnation: Count


PeerReply = Welcome | Grant | Refuse | Held | Broken | Settled | Pong
