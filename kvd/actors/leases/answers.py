"""What the daemons of consumers are told of their claims, and how often.

- Who asks about claims that are not there, as strangers and defects do, is answered at a pace. So is who sends wrong
  proofs; a right one is answered all the same, or one worker's wrong tickets would hold up its neighbours' pulls.
- A reader of an offer that grows is told what is new once for each time it asks: nobody is told faster than it reads,
  and what came meanwhile is told together, up to a bound on one answer: whoever asks by a few bytes gets no megabytes,
  and those answers that it leaves unread take little memory.
- Claims that break together are told together.
"""

from collections.abc import Callable, Sequence

import structlog

from kvd import limits
from kvd.actors.leases.claim import NOT_HELD, ClaimKey, ClaimRecord, State
from kvd.actors.leases.lease import Lease
from kvd.actors.runtime.actor import Actor
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.deferred import Batch
from kvd.actors.runtime.pace import RateLimit, TokenBuckets, WarnOnce
from kvd.errors import ErrorCode, KvdError
from kvd.protocol.peer import Broken, Fence, Grant, Grown, Held, LeaseAnswer, Refuse, Settled

_WRONG_PROOFS = RateLimit(limits.MAX_WRONG_PROOFS / 60, limits.MAX_WRONG_PROOFS)
_UNKNOWN = RateLimit(limits.MAX_UNKNOWN_CLAIMS_PER_SECOND, limits.MAX_UNKNOWN_CLAIMS)
_TOLD = RateLimit(limits.MAX_TOLD_BYTES_PER_SECOND, limits.MAX_TOLD_BYTES)


class Answers:
    """Answers by `reply(sender, answer)`. `peer` is whose a request is: the same for all its runs and links."""

    def __init__(self, actor: Actor, context: ActorContext, reply: Callable[[bytes, LeaseAnswer], None]) -> None:
        self._context = context
        self._reply = reply
        self._untold: Batch[ClaimRecord] = Batch(actor, self._tell_broken)
        self._behind: Batch[ClaimRecord] = Batch(actor, self._tell_all_grown, _untold_blocks)
        """Readers of offers that have grown."""
        # By peer.
        self._wrong_proofs: TokenBuckets[str] = TokenBuckets(_WRONG_PROOFS)
        self._unknown: TokenBuckets[str] = TokenBuckets(_UNKNOWN)
        self._told: TokenBuckets[str] = TokenBuckets(_TOLD)
        """Bytes of large answers about offers that grow."""
        self._once = WarnOnce(structlog.get_logger("kvd.leases"), "kvd_wrong_proofs_total")

    def drops(self, peer: str) -> bool:
        """Whether to pass over what a peer asks about claims: it has asked too often about some that are not there."""
        if not self._unknown.is_empty(peer, self._context.loop.time()):
            return False
        self._context.metrics.refused.labels("peer", ErrorCode.OVERLOADED).inc()
        return True

    # --- of a claim -------------------------------------------------------------------------------------------------

    def granted(self, claim: ClaimRecord) -> None:
        """The claim holds its lease."""
        assert claim.lease is not None  # noqa: S101 - it is held
        number, incarnation = claim.key.claim, self._context.settings.incarnation
        self._reply(claim.key.sender, Grant(number, claim.lease.generation, claim.lease.pool.epoch, incarnation))

    def refused(self, claim: ClaimRecord, error: KvdError) -> None:
        """It holds nothing."""
        self._context.metrics.claims.labels("refused").inc()
        if self._may_hear(claim.peer, error):
            self._reply(claim.key.sender, Refuse(claim.key.claim, error.code, error.text))

    def broken_later(self, claim: ClaimRecord) -> None:
        """It held its lease, and holds it no more: its consumer is told together with others."""
        self._untold.put(claim)

    def _tell_broken(self, broken: list[ClaimRecord]) -> None:
        claims: dict[tuple[bytes, str], list[int]] = {}
        for claim in broken:
            claims.setdefault((claim.key.sender, claim.error.text), []).append(claim.key.claim)
        for (sender, why), numbers in claims.items():
            for start in range(0, len(numbers), limits.MAX_RENEWALS):
                some = tuple(numbers[start : start + limits.MAX_RENEWALS])
                self._reply(sender, Broken(some, ErrorCode.LEASE_BROKEN, why))

    # --- of what a peer asked ---------------------------------------------------------------------------------------

    def held(self, key: ClaimKey) -> None:
        """The fence holds."""
        self._reply(key.sender, Held(key.claim))

    def not_held(self, key: ClaimKey, peer: str, error: KvdError) -> None:
        """The claim that a peer asked about is not held."""
        self._unknown.charge(peer, self._context.loop.time(), 1)
        if self._may_hear(peer, error):
            self._reply(key.sender, Broken((key.claim,), error.code, error.text))

    def not_renewed(self, sender: bytes, peer: str, numbers: Sequence[int]) -> None:
        """These claims could not be renewed."""
        if numbers:
            self._unknown.charge(peer, self._context.loop.time(), len(numbers))
            self._reply(sender, Broken(tuple(numbers), ErrorCode.LEASE_BROKEN, NOT_HELD.text))

    def settled(self, sender: bytes, peer: str, fences: Sequence[Fence], errors: Sequence[KvdError]) -> None:
        """All of these are over; `errors` says why some do not hold, which their sender does not need to know."""
        for error in errors:
            self._log_wrong_proof(peer, error)
        if errors:
            self._unknown.charge(peer, self._context.loop.time(), len(errors))
        self._reply(sender, Settled(tuple(fence.claim for fence in fences)))

    def _may_hear(self, peer: str, error: KvdError) -> bool:
        """Whether a peer gets this answer: one that sends many wrong proofs does not hear of each."""
        if error.code is not ErrorCode.BAD_TICKET:
            return True
        self._log_wrong_proof(peer, error)
        return self._wrong_proofs.take(peer, self._context.loop.time())

    def _log_wrong_proof(self, peer: str, error: KvdError) -> None:
        if error.code is ErrorCode.BAD_TICKET:
            self._once.warn("wrong proof", peer, peer=peer, text=error.text)

    # --- of an offer that grows -------------------------------------------------------------------------------------

    def follow(self, claim: ClaimRecord, seen: int) -> None:
        """The reader of a claim that is held knows `seen` parts, and asks for more."""
        if seen < claim.told:  # an answer was lost, once in a while
            self._unknown.charge(claim.peer, self._context.loop.time(), 1)
        claim.follows = seen
        self._tell_grown(claim)

    def grown(self, lease: Lease) -> None:
        """An offer was extended or closed: its readers are told, some at a time if they are many."""
        for claim in lease.claims.values():
            if claim.follows is not None:
                self._behind.put(claim)

    def _tell_all_grown(self, claims: list[ClaimRecord]) -> None:
        for claim in claims:
            if claim.state is State.HELD:
                self._tell_grown(claim)

    def _tell_grown(self, claim: ClaimRecord) -> None:
        lease, seen = claim.lease, claim.follows
        if lease is None or seen is None or seen >= len(lease.content.parts):
            return
        told = lease.content.after(seen)
        if not self._may_tell(claim.peer, sum(len(span.ids) for span in told.spans)):
            return  # it asks again
        claim.follows, claim.told = None, max(claim.told, told.parts)
        grown = Grown(
            claim=claim.key.claim,
            seen=seen,
            parts=told.parts,
            tokens=told.tokens,
            spans=told.spans,
            closed=told.is_last,
            stamp=lease.stamp,
        )
        self._reply(claim.key.sender, grown)

    def _may_tell(self, peer: str, size: int) -> bool:
        """Whether a peer gets so many bytes now; small answers wait for nothing."""
        if size <= limits.SMALL_TOLD_BYTES:
            return True
        now = self._context.loop.time()
        if self._told.is_empty(peer, now):
            return False
        self._told.charge(peer, now, size)
        return True


def _untold_blocks(claim: ClaimRecord) -> int:
    """How many blocks the reader of a claim that is held waits to be told of."""
    if claim.lease is None or claim.follows is None:
        return 0
    return claim.lease.content.blocks_after(claim.follows)
