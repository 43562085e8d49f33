"""The claims of other daemons on the leases of this one, and the producer's half of the fence.

Each claim follows the table of `claim` and is kept by (sender, number), so that a request that comes twice gets the
same answer both times.
"""

from collections import Counter
from collections.abc import Callable

from kvd import limits
from kvd.actors.leases import claim as machine
from kvd.actors.leases import lease as lease_machine
from kvd.actors.leases.answers import Answers
from kvd.actors.leases.claim import NOT_HELD, ClaimKey, ClaimRecord, Effect, Event, State, WaitingClaims
from kvd.actors.leases.lease import Lease
from kvd.actors.leases.offers import Offers
from kvd.actors.runtime.actor import Actor, Component
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.deferred import Batch, Deadlines
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.protocol.peer import Claim, Fence, Follow, LeaseAnswer, LeaseRequest, Release, Renew, Settle


class Claims(Component):
    """See the module's text.

    `remember(key, owner)` has `forget` called for a claim that has ended, after a while. `expect_readers` is called
    with True when the first claim is held whose read this daemon's transport has a part in, and with False when none
    is.
    """

    def __init__(
        self,
        actor: Actor,
        context: ActorContext,
        offers: Offers,
        *,
        reply: Callable[[bytes, LeaseAnswer], None],
        remember: Callable[[ClaimKey, str], None],
        expect_readers: Callable[[bool], None],
    ) -> None:
        self.actor = actor
        self._context = context
        self._offers = offers
        self._answers = Answers(actor, context, reply)
        self._remember = remember
        self._expect_readers = expect_readers
        self._records: dict[ClaimKey, ClaimRecord] = {}
        self._waiting = WaitingClaims()
        self._judging: Batch[ClaimRecord] = Batch(actor, self._judge_waiting)
        """Those that wait, and whose offers have come or cannot come any more.

        Those that are leaving come last: what they finish must not end the lease of one that is yet to be granted.
        """
        self.held = 0
        """How many are granted, and hold their leases."""
        self._held_of: Counter[str] = Counter()
        """By peer."""
        self._served = 0
        """Held claims whose reads the transport has a part in."""
        self._due: Deadlines[ClaimKey] = Deadlines(context.loop, Batch(actor, self._overdue).put, for_others=True)

    def requested(self, sender: bytes, peer: str, request: LeaseRequest) -> None:
        """Answers a request of a consumer's daemon, at most once.

        `sender` is its routing id; `peer` is the same for all its runs and links.
        """
        match request:
            case Claim() as claim:
                self._claim(ClaimKey(sender, claim.claim), peer, claim)
            case Release() as release:
                self._release(ClaimKey(sender, release.claim), finished=release.finished)
            case _ if self._answers.drops(peer):
                pass
            case Follow() as follow:
                self._follow(ClaimKey(sender, follow.claim), peer, follow)
            case Fence() as fence:
                self._fence(ClaimKey(sender, fence.claim), peer, fence)
            case Settle() as settle:
                self._settle(sender, peer, settle.fences)
            case Renew() as renewal:
                self._renew(sender, peer, renewal.claims)

    # --- a claim comes ----------------------------------------------------------------------------------------------

    def _claim(self, key: ClaimKey, peer: str, request: Claim) -> None:
        claim = self._records.get(key)
        if claim is None:
            self._judge(self._add(key, peer, request))
        elif claim.state is State.HELD:
            self._due.set(key, self._context.loop.time() + request.ttl)
            self._answers.granted(claim)
        elif claim.state is State.BROKEN:
            self._answers.refused(claim, claim.error)

    def _add(self, key: ClaimKey, peer: str, request: Claim) -> ClaimRecord:
        spans = self._context.spans
        span = spans.claim(request) if spans is not None and request.traceparent is not None else None
        self._records[key] = claim = ClaimRecord(key, peer, request, span)
        return claim

    def _judge(self, claim: ClaimRecord) -> KvdError | None:
        """Grants a claim, has it wait for its offer or refuses it, and then says why.

        For one that is leaving it counts its reader instead, and answers nothing.
        """
        leaving = claim.state is State.LEAVING
        try:
            lease = self._offers.for_claim(claim.request)
            if lease is None:
                given_up = self._waiting.put(claim)
                if given_up is not None:
                    self._end(given_up, Event.BREAK, "released")
                if claim.key not in self._due:
                    self._due.set(claim.key, self._context.loop.time() + self._context.settings.claim_wait)
                return None
            self._hold(claim, lease)
        except KvdError as error:
            self._end(claim, Event.REFUSE, "refused", error)
            if not leaving:
                self._answers.refused(claim, error)
            return error
        if leaving:
            self._end(claim, Event.RELEASE, "released", finished=True)
            return None
        self._context.metrics.claims.labels("granted").inc()
        if claim.span is not None:
            claim.span.granted()
        self._answers.granted(claim)
        return None

    def offered(self, lease: Lease) -> None:
        """Answers the claims that came before this offer."""
        self._judge_again(self._waiting.for_offer(lease.key))

    def refuse_waiting(self) -> None:
        """Refuses the claims that wait, now that nothing new is offered."""
        self._judge_again(self._waiting.all())

    def _judge_again(self, claims: list[ClaimRecord]) -> None:
        for claim in claims:
            self._judging.put(claim)
        for claim in claims:
            if claim.state is State.LEAVING:
                self._judging.defer(claim)

    def _judge_waiting(self, claims: list[ClaimRecord]) -> None:
        for claim in claims:
            if self._waiting.discard(claim):
                self._judge(claim)

    def _hold(self, claim: ClaimRecord, lease: Lease) -> None:
        """Adds a claim to a lease.

        Raises:
            Unavailable: `OVERLOADED`, too many claims or consumers have a part in it, or this peer holds too many;
                `OFFER_GONE`, it has ended.

        """
        request = claim.request
        if len(lease.claims) >= limits.MAX_CLAIMS_PER_OFFER:
            text = f"{limits.MAX_CLAIMS_PER_OFFER} claims hold the offer {request.offer!r} already"
            raise refusal(ErrorCode.OVERLOADED, text)
        if self._held_of[claim.peer] >= limits.MAX_CLAIMS_PER_PEER:
            text = f"{self._held_of[claim.peer]} claims of this daemon hold offers here, the bound; try again later"
            raise refusal(ErrorCode.OVERLOADED, text)
        self._offers.bounds.check_consumer(lease, request.consumer)
        if not self._offers.claim(lease):
            raise refusal(ErrorCode.OFFER_GONE, f"the offer {request.offer!r} has ended ({lease.reason})")
        claim.state, claim.lease = machine.TABLE.step(claim.state, Event.GRANT).state, lease
        lease.hold(claim)
        self._due.set(claim.key, self._context.loop.time() + request.ttl)
        self._count(claim, +1)

    # --- it is held -------------------------------------------------------------------------------------------------

    def _renew(self, sender: bytes, peer: str, numbers: tuple[int, ...]) -> None:
        now = self._context.loop.time()
        lost = []
        for number in numbers:
            claim = self._records.get(ClaimKey(sender, number))
            if claim is None or claim.state is State.BROKEN:
                lost.append(number)
            elif claim.state is State.HELD:
                self._due.set(claim.key, now + claim.request.ttl)
        self._answers.not_renewed(sender, peer, lost)

    def _follow(self, key: ClaimKey, peer: str, follow: Follow) -> None:
        claim = self._records.get(key)
        if claim is None or claim.state is State.BROKEN:
            self._answers.not_held(key, peer, NOT_HELD if claim is None else claim.error)
        elif claim.state is State.HELD:
            self._answers.follow(claim, follow.seen)

    def grown(self, lease: Lease) -> None:
        """Tells the readers of an offer that it was extended or closed."""
        self._answers.grown(lease)

    def _settle(self, sender: bytes, peer: str, fences: tuple[Fence, ...]) -> None:
        settled = [self._settle_one(ClaimKey(sender, fence.claim), peer, fence) for fence in fences]
        self._answers.settled(sender, peer, fences, [error for error in settled if error is not None])

    def _settle_one(self, key: ClaimKey, peer: str, fence: Fence) -> KvdError | None:
        if fence.generation:
            return self._check_fence(key, peer, fence)
        claim = self._records.get(key)
        if claim is not None:
            self._release(key, finished=True)
            return None
        if fence.unclaimed is None:
            return NOT_HELD
        claim = self._add(key, peer, fence.unclaimed)
        claim.state = machine.TABLE.step(claim.state, Event.CANCEL).state
        return self._judge(claim)

    def _fence(self, key: ClaimKey, peer: str, fence: Fence) -> None:
        error = self._check_fence(key, peer, fence)
        if error is None:
            self._answers.held(key)
        else:
            self._answers.not_held(key, peer, error)

    def _check_fence(self, key: ClaimKey, peer: str, fence: Fence) -> KvdError | None:
        """Why the lease is not held under that generation; None if it is, and then this reader has finished."""
        claim, error = self._records.get(key), None
        if claim is None and fence.unclaimed is not None:
            claim = self._add(key, peer, fence.unclaimed)
            error = self._hold_unclaimed(claim, fence.generation)
        if claim is not None and claim.is_of(fence.generation):
            if not claim.knows_all(fence):
                text = f"the offer {claim.request.offer!r} is not closed, or has blocks that were not read"
                error = refusal(ErrorCode.LEASE_BROKEN, text)
            elif claim.state is State.HELD:
                self._end(claim, Event.FENCE, "held", finished=True)
        held = error is None and claim is not None and claim.state is State.FENCED and claim.is_of(fence.generation)
        self._context.metrics.fences.labels("held" if held else "broken").inc()
        if held:
            return None
        return error or (NOT_HELD if claim is None else claim.error)

    def _hold_unclaimed(self, claim: ClaimRecord, generation: int) -> KvdError | None:
        """Holds the claim of a read that was not claimed: the lease that its ticket named must still be alive."""
        try:
            lease = self._offers.for_claim(claim.request)
            if lease is None or lease.generation != generation:
                raise refusal(ErrorCode.OFFER_GONE, f"the offer {claim.request.offer!r} has ended")
            self._hold(claim, lease)
        except KvdError as error:
            self._end(claim, Event.REFUSE, "broken", error)
            return error
        return None

    # --- it ends ----------------------------------------------------------------------------------------------------

    def _release(self, key: ClaimKey, *, finished: bool) -> None:
        claim = self._records.get(key)
        if claim is None or claim.state is State.LEAVING:
            return
        if claim.state is State.WAITING and finished:
            claim.state = machine.TABLE.step(claim.state, Event.CANCEL).state
            self._waiting.leave(claim)
            self._judging.defer(claim)
        else:
            self._end(claim, Event.RELEASE, "released", finished=finished)

    def _overdue(self, keys: list[ClaimKey]) -> None:
        """The offers of these claims have not come in time, or the claims were not renewed."""
        for key in keys:
            claim = self._records.get(key)
            if claim is None or key in self._due:
                continue
            request = claim.request
            if claim.state is State.HELD:
                self._break(claim, refusal(ErrorCode.LEASE_BROKEN, f"the claim was not renewed for {request.ttl:g} s"))
            elif claim.state is State.WAITING:
                error = refusal(ErrorCode.OFFER_GONE, f"no offer {request.offer!r} was made by {request.pool!r}")
                self._break(claim, error)
                self._answers.refused(claim, error)
            elif claim.state is State.LEAVING:
                self._end(claim, Event.BREAK, "released")

    def break_all(self, lease: Lease, why: str) -> None:
        """Breaks every claim of a lease that has ended."""
        for claim in list(lease.claims.values()):
            self._break(claim, refusal(ErrorCode.LEASE_BROKEN, why))

    def _break(self, claim: ClaimRecord, error: KvdError) -> None:
        claim.error = error
        self._end(claim, Event.BREAK, "refused" if claim.state is State.WAITING else "broken", error)

    def _end(
        self, claim: ClaimRecord, event: Event, outcome: str, error: KvdError | None = None, *, finished: bool = False
    ) -> None:
        """Ends a claim. `outcome` is for its trace; `finished` says that this reader will not come again."""
        step = machine.TABLE.step(claim.state, event)
        claim.state = step.state
        self._waiting.discard(claim)
        self._due.unset(claim.key)
        if claim.span is not None:
            claim.span.end(outcome, error)
            claim.span = None
        for effect in step.effects:
            match effect:
                case Effect.REMEMBER:
                    self._remember(claim.key, f"peer {claim.peer}")
                case Effect.FORGET:
                    del self._records[claim.key]
                case Effect.TELL:
                    self._answers.broken_later(claim)
                case Effect.LEAVE:
                    self._leave(claim, finished=finished)

    def _leave(self, claim: ClaimRecord, *, finished: bool) -> None:
        """Takes a claim out of its lease, which ends or goes on."""
        lease = claim.lease
        assert lease is not None  # noqa: S101 - it was held
        lease.let_go(claim)
        self._count(claim, -1)
        if finished:
            self._offers.bounds.finish(lease, claim.request)
        if lease.is_read:
            self._offers.step(lease, lease_machine.Event.FINISHED, "read")
        elif not lease.claims:
            self._offers.unclaim(lease)

    def forget(self, key: ClaimKey) -> None:
        """Forgets what became of a claim."""
        del self._records[key]

    # --- what is told -----------------------------------------------------------------------------------------------

    def _count(self, claim: ClaimRecord, change: int) -> None:
        self._held_of[claim.peer] += change
        if not self._held_of[claim.peer]:
            del self._held_of[claim.peer]
        self.held += change
        self._context.metrics.claims_active.set(self.held)
        if claim.request.serve:
            self._served += change
            if self._served == max(0, change):
                self._expect_readers(self._served > 0)

    @property
    def waiting(self) -> int:
        """How many wait for their offers."""
        return len(self._waiting)
