"""A lease: the promise that the blocks of one offer keep their content. Runs at the producer's daemon.

The rules, which the table below makes precise:

- A lease has a generation that no other lease of this daemon, before or after it, has. A fence holds only if the lease
  is alive and the generation is that of the grant.
- It ends when as many consumers as were offered it have finished and no other holds a claim (`released`), when its time
  is over and nobody holds a claim (`expired`; while somebody does, it is `overdue`), or when the producer takes it back
  (`revoked`).
- A consumer has finished when all ranks of its engine have. An offer to any number of consumers counts none: it expires
  or is revoked.
- The end of a lease breaks the claims that are still held, before the worker is told that the blocks are its own again:
  from then on no fence of theirs can hold.
- An offer that grows is one lease from its opening on. Its time begins anew with each extension and with its close; it
  is taken back if its worker's session ends before it is closed.
- A claim that lapses (its consumer went silent) is broken alone; the lease goes on for the others.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kvd import limits
from kvd.actors.leases.claim import ClaimKey, ClaimRecord, OfferKey
from kvd.actors.leases.content import Content
from kvd.actors.runtime.machine import Step, Table
from kvd.actors.runtime.pools import NOTHING, Hold, Pool, Size
from kvd.errors import ErrorCode, refusal
from kvd.protocol.peer import Claim


class State(StrEnum):
    """Who relies on the lease."""

    OFFERED = "offered"
    """nobody yet, or nobody just now"""
    CLAIMED = "claimed"
    """at least one reader"""
    OVERDUE = "overdue"
    """at least one reader; its time is over, so that it ends with the last claim"""
    RELEASED = "released"
    """nobody: the consumers that it was for have finished"""
    EXPIRED = "expired"
    """nobody: its time is over"""
    REVOKED = "revoked"
    """nobody: the producer took it back"""


class Event(StrEnum):
    """What happened."""

    CLAIM = "claim"
    """a reader claims it"""
    UNCLAIMED = "unclaimed"
    """the last claim on it is gone, and consumers are to come"""
    FINISHED = "finished"
    """as many consumers as were offered it have finished, and no other holds a claim"""
    EXPIRE = "expire"
    """the offer's time is over"""
    GROWN = "grown"
    """it was extended or closed, and its time begins anew"""
    REVOKE = "revoke"
    """the worker withdraws it, a successor of the worker wants the pool, or the daemon drains"""


class Effect(StrEnum):
    """What to do."""

    GRANT = "grant"
    REFUSE = "refuse"
    BREAK = "break"
    """break every claim that is still held"""
    RELEASE = "release"
    """tell the worker that the blocks are its own again"""


_S, _E, _F = State, Event, Effect
IN_CLAIM = (_S.CLAIMED, _S.OVERDUE)
_ENDED = (_S.RELEASED, _S.EXPIRED, _S.REVOKED)

TABLE: Table[State, Event, Effect] = Table(
    "lease",
    initial=_S.OFFERED,
    final=frozenset(_ENDED),
    steps={
        (_S.OFFERED, _E.CLAIM): Step(_S.CLAIMED, (_F.GRANT,)),
        (_S.OFFERED, _E.FINISHED): Step(_S.RELEASED, (_F.RELEASE,)),
        (_S.OFFERED, _E.EXPIRE): Step(_S.EXPIRED, (_F.RELEASE,)),
        (_S.OFFERED, _E.REVOKE): Step(_S.REVOKED, (_F.RELEASE,)),
        (_S.CLAIMED, _E.CLAIM): Step(_S.CLAIMED, (_F.GRANT,)),
        (_S.CLAIMED, _E.UNCLAIMED): Step(_S.OFFERED),
        (_S.CLAIMED, _E.EXPIRE): Step(_S.OVERDUE),
        (_S.OVERDUE, _E.CLAIM): Step(_S.OVERDUE, (_F.GRANT,)),
        (_S.OVERDUE, _E.UNCLAIMED): Step(_S.EXPIRED, (_F.RELEASE,)),
        (_S.OVERDUE, _E.GROWN): Step(_S.CLAIMED),
        **{(state, _E.FINISHED): Step(_S.RELEASED, (_F.BREAK, _F.RELEASE)) for state in IN_CLAIM},
        **{(state, _E.REVOKE): Step(_S.REVOKED, (_F.BREAK, _F.RELEASE)) for state in IN_CLAIM},
        **{(ended, _E.CLAIM): Step(ended, (_F.REFUSE,)) for ended in _ENDED},
    },
    ignored={
        _S.OFFERED: frozenset({_E.UNCLAIMED, _E.GROWN}),
        _S.CLAIMED: frozenset({_E.GROWN}),
        _S.OVERDUE: frozenset({_E.EXPIRE}),
        **dict.fromkeys(_ENDED, frozenset({_E.UNCLAIMED, _E.FINISHED, _E.EXPIRE, _E.REVOKE})),
    },
)

HOLD_OF: Final = {_S.OFFERED: Hold.OFFERED, _S.CLAIMED: Hold.CLAIMED, _S.OVERDUE: Hold.OVERDUE}
"""As what a lease's blocks are counted."""


@dataclass(slots=True, eq=False)
class Lease:
    """What was promised with one offer; follows `TABLE`. `expires` is in seconds on the loop's clock."""

    key: OfferKey
    pool: Pool
    generation: int
    proof: bytes = field(repr=False)
    """What a claim has to show."""
    secret: bytes = field(repr=False)
    """The offer's, until it is closed."""
    consumers: int
    """How many may finish before it ends, 0 for any number."""
    ttl: float
    expires: float
    content: Content = field(default_factory=Content)
    size: Size = NOTHING
    """Of all its blocks."""
    stamp: int = 0
    """The word that holds its stamp while it is alive, 0 for none."""
    state: State = TABLE.initial
    counted: Hold | None = None
    """As what its blocks are counted."""
    reason: str = ""
    """Why it ended, in the words of `Released.reason`."""
    claims: dict[ClaimKey, ClaimRecord] = field(default_factory=dict)
    """Those that are held."""
    reading: Counter[str] = field(default_factory=Counter)
    """How many of them are of each consumer that has not finished."""
    finished: dict[str, int] = field(default_factory=dict)
    """Readers that have finished, by consumer, as bits; not kept if consumers are not counted."""
    done: set[str] = field(default_factory=set)
    """Consumers all of whose readers have finished."""

    def hold(self, claim: ClaimRecord) -> None:
        """A claim is held from now on."""
        self.claims[claim.key] = claim
        if claim.request.consumer not in self.done:
            self.reading[claim.request.consumer] += 1

    def let_go(self, claim: ClaimRecord) -> None:
        """It is held no more."""
        del self.claims[claim.key]
        consumer = claim.request.consumer
        if consumer in self.reading:
            self.reading[consumer] -= 1
            if not self.reading[consumer]:
                del self.reading[consumer]

    def finish(self, claim: Claim) -> bool:
        """One reader has all it wanted. Whether it is the first of its consumer."""
        first = claim.consumer not in self.finished
        if self.consumers:
            readers = self.finished.get(claim.consumer, 0) | 1 << claim.reader
            self.finished[claim.consumer] = readers
            if readers.bit_count() >= claim.readers:
                self.done.add(claim.consumer)
                self.reading.pop(claim.consumer, None)
        return first and bool(self.consumers)

    @property
    def weight(self) -> int:
        """How much work its end is, counted in blocks: those are given back, span by span, and claims are broken."""
        spans, claims = limits.BLOCKS_PER_RETURN * self.content.spans, limits.BLOCKS_PER_CLAIM * len(self.claims)
        return self.size.blocks + spans + claims

    @property
    def is_read(self) -> bool:
        """Whether as many consumers have finished as it was offered to, and no other holds a claim."""
        return 0 < self.consumers <= len(self.done) and not self.reading


class Bounds:
    """How much the offers of one worker may take: offers that stand, their parts, and consumers that are remembered.

    Counts by the id of the worker's pool, until the blocks of an offer are the worker's again.
    """

    def __init__(self) -> None:
        self.standing: Counter[int] = Counter()
        self.parts: Counter[int] = Counter()
        self._consumers: Counter[int] = Counter()
        """Those that have finished with an offer: it is the lease that has them."""

    def check_offer(self, pool: int) -> None:
        """Checks whether one more may stand.

        Raises:
            Unavailable: `OVERLOADED`.

        """
        if self.standing[pool] >= limits.MAX_REQUESTS_PER_WORKER:
            text = f"{self.standing[pool]} offers of this worker stand, the bound; wait until some are released"
            raise refusal(ErrorCode.OVERLOADED, text)

    def check_parts(self, lease: Lease) -> None:
        """Checks whether one more may be named for this offer.

        Raises:
            BadRequest: `TOO_LARGE`, this offer has too many, or too many lists of block ids.
            Unavailable: `OVERLOADED`, all of its worker's do.

        """
        if len(lease.content.parts) >= limits.MAX_PARTS_PER_OFFER:
            text = f"the offer was extended {len(lease.content.parts)} times, the bound; close it with all that is left"
            raise refusal(ErrorCode.TOO_LARGE, text)
        if lease.content.spans >= limits.MAX_SPANS_PER_OFFER:
            text = f"the offer has {lease.content.spans} lists of block ids, the bound; close it with all that is left"
            raise refusal(ErrorCode.TOO_LARGE, text)
        if self.parts[lease.pool.id] >= limits.MAX_PARTS_PER_WORKER:
            text = f"{self.parts[lease.pool.id]} parts of this worker's offers stand, the bound"
            raise refusal(ErrorCode.OVERLOADED, f"{text}; name more at a time, or wait until some are released")

    def check_consumer(self, lease: Lease, consumer: str) -> None:
        """Checks whether a consumer may have a part in an offer.

        Raises:
            Unavailable: `OVERLOADED`, too many have one in this offer, or in all of its worker's.

        """
        if consumer in lease.finished:
            return
        of_worker = self._consumers[lease.pool.id]
        if len(lease.finished) >= 2 * limits.MAX_CONSUMERS or of_worker >= limits.MAX_CONSUMERS_PER_WORKER:
            text = f"{len(lease.finished)} consumers have a part in the offer {lease.key[1]!r} already"
            raise refusal(ErrorCode.OVERLOADED, f"{text}, {of_worker} in all offers of its worker")

    def finish(self, lease: Lease, claim: Claim) -> None:
        """One reader of a consumer has all it wanted."""
        if lease.finish(claim):
            self._consumers[lease.pool.id] += 1

    def begin(self, lease: Lease) -> None:
        """It stands from now on."""
        self.standing[lease.pool.id] += 1

    def end(self, lease: Lease) -> None:
        """Its blocks are its worker's again: nobody counts its parts and its consumers any more."""
        pool = lease.pool.id
        self.standing -= Counter({pool: 1})
        self.parts -= Counter({pool: lease.content.spans})
        self._consumers -= Counter({pool: len(lease.finished)})
        lease.finished.clear()
        lease.done.clear()
