"""The claims of other daemons on the leases of this one, and the producer's half of the fence.

Claims are kept by (sender, number), so that an ask that comes twice is answered the same both times; what has ended is
remembered for a while, so that a late ask gets its reason instead of a wait.
"""

import hmac
from collections.abc import Callable

from kvd import limits
from kvd.actors.leases.messages import PeerRequest
from kvd.actors.leases.offers import ClaimKey, Lease, Offers
from kvd.actors.leases.waiting import WaitingClaims
from kvd.actors.runtime.batch import Batch
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.deadlines import Deadlines
from kvd.actors.runtime.spans import ClaimSpan
from kvd.actors.runtime.token_bucket import RateLimit, TokenBuckets
from kvd.errors import BadRequest, ErrorCode, KvdError, Unavailable
from kvd.protocol.peer import Broken, Claim, Fence, Grant, Held, Refuse, Release, Renew, Settle, Settled
from kvd.state import lease as machine
from kvd.state.lease import Event

_WRONG_PROOFS = RateLimit(limits.MAX_WRONG_PROOFS / 60, limits.MAX_WRONG_PROOFS)
_NOT_HELD = "this daemon knows no such claim (any more)"


class Claims:
    """See the module's text.

    `wait_over` and `expired` are called when a claim's offer has not come, and when it was not renewed; `ended` when
    what became of it is to be remembered until `forget`; `broke` when `tell_broken` has something to tell.
    `expect_readers` is called when the first claim comes, and when the last ends, whose reads the transport of this
    daemon has a part in.
    """

    def __init__(
        self,
        context: ActorContext,
        offers: Offers,
        *,
        wait_over: Callable[[ClaimKey], None],
        expired: Callable[[ClaimKey], None],
        ended: Callable[[ClaimKey], None],
        broke: Callable[[], None],
        expect_readers: Callable[[bool], None],
    ) -> None:
        self._context = context
        self._offers = offers
        self._ended = ended
        self._expect_readers = expect_readers
        self._held: dict[ClaimKey, Lease] = {}
        self._served = 0
        """Of them, those whose reads the transport has a part in."""
        self._due: Deadlines[ClaimKey] = Deadlines(context.loop, expired)
        self._waiting = WaitingClaims(context.loop, context.settings.claim_wait, wait_over)
        self._fenced: dict[ClaimKey, int] = {}
        """Claims whose fence held, with the generation: the same answer to the same ask."""
        self._broken: dict[ClaimKey, KvdError] = {}
        """Claims that were held, or waited, and why they are not and do not any more."""
        self._untold: Batch[tuple[ClaimKey, str]] = Batch(broke)
        """Claims that were broken, and why, which their consumers are to hear."""
        self._wrong_proofs: TokenBuckets[str] = TokenBuckets(_WRONG_PROOFS)
        """By peer."""
        self._spans: dict[ClaimKey, ClaimSpan] = {}
        """Of the claims that are traced and have not ended."""

    def asked(self, message: PeerRequest) -> None:
        """One ask of a consumer's daemon; at most one answer goes back."""
        sender, peer = message.sender, message.peer
        match message.request:
            case Claim() as claim:
                self._claim(ClaimKey(sender, claim.claim), peer, claim)
            case Fence() as fence:
                self._fence(ClaimKey(sender, fence.claim), peer, fence)
            case Settle() as settle:
                for fence in settle.fences:
                    self._check_fence(ClaimKey(sender, fence.claim), fence)
                self._reply(sender, Settled(tuple(fence.claim for fence in settle.fences)))
            case Renew() as renewal:
                self._renew(sender, renewal.claims)
            case Release() as release:
                key = ClaimKey(sender, release.claim)
                self._end_span(key, "released")
                self._waiting.take(key)
                self._drop(key, finished=release.finished)

    # --- a claim is asked for ---------------------------------------------------------------------------------------

    def _claim(self, key: ClaimKey, peer: str, request: Claim) -> None:
        held = self._held.get(key)
        if held is not None:
            self._due.set(key, self._context.loop.time() + request.ttl)
            self._grant(key, held)
        elif key in self._broken:
            self._refuse(key, peer, self._broken[key])
        elif key not in self._waiting and key not in self._fenced:
            self._begin_span(key, request)
            self._claim_anew(key, peer, request)

    def _claim_anew(self, key: ClaimKey, peer: str, request: Claim) -> None:
        try:
            lease = self._lease_of(request)
            if lease is None:
                self._check_may_come(request)
                self._waiting.put(key, peer, request)
                return
        except KvdError as error:
            self._refuse(key, peer, error)
            return
        self._claim_lease(key, peer, request, lease)

    def _lease_of(self, request: Claim) -> Lease | None:
        """The lease that a claim speaks of, which may have ended; None where its offer has not come.

        Raises:
            KvdError: `OFFER_GONE`, the lease that the ticket names has ended; `BAD_TICKET`, the proof is another
                offer's.

        """
        if request.incarnation not in (0, self._context.settings.incarnation):
            text = f"the offer {request.offer!r} was made to an earlier run of this daemon, which has ended"
            raise Unavailable(ErrorCode.OFFER_GONE, text)
        lease = self._offers.find(request.pool, request.offer)
        if request.generation and (lease is None or lease.generation != request.generation):
            raise Unavailable(ErrorCode.OFFER_GONE, f"the offer {request.offer!r} that the ticket names has ended")
        if lease is None or hmac.compare_digest(request.proof, lease.proof):
            return lease
        if lease.state in machine.TABLE.final and not request.generation:
            return None  # it was another offer of that name
        self._context.metrics.wrong_proofs.inc()
        text = f"the ticket and the offer {request.offer!r} differ in secret or blocks; pass the ticket on unchanged"
        raise BadRequest(ErrorCode.BAD_TICKET, text)

    def _check_may_come(self, request: Claim) -> None:
        if self._offers.draining:
            raise _cannot_come(request)
        if not self._offers.has_pool(request.pool):
            text = f"no worker {request.pool!r} is attached here, so that the offer {request.offer!r} cannot come"
            raise Unavailable(ErrorCode.OFFER_GONE, text)

    def offered(self, lease: Lease) -> None:
        """Claims that came before this offer are answered now."""
        for key, (peer, request) in self._waiting.take_for(lease.key):
            self._claim_anew(key, peer, request)

    def wait_over(self, key: ClaimKey) -> None:
        """The offer that a claim waited for did not come; asked again, the claim gets the same answer."""
        waiting = self._waiting.take(key)
        if waiting is not None:
            peer, request = waiting
            text = f"no offer {request.offer!r} was made by {request.pool!r}"
            self._broken[key] = error = Unavailable(ErrorCode.OFFER_GONE, text)
            self._ended(key)
            self._refuse(key, peer, error)

    def refuse_waiting(self) -> None:
        """No claim waits any more: nothing new will be offered."""
        for key, (peer, request) in self._waiting.take_all():
            self._refuse(key, peer, _cannot_come(request))

    def _claim_lease(self, key: ClaimKey, peer: str, request: Claim, lease: Lease) -> None:
        try:
            self._hold(key, request, lease)
        except KvdError as error:
            self._refuse(key, peer, error)
            return
        self._context.metrics.claims.labels("granted").inc()
        if key in self._spans:
            self._spans[key].granted()
        self._grant(key, lease)

    def _hold(self, key: ClaimKey, request: Claim, lease: Lease) -> None:
        """Adds a claim to a lease.

        Raises:
            Unavailable: `OVERLOADED`, too many have a part in it; `OFFER_GONE`, it has ended.

        """
        if len(lease.claims) >= limits.MAX_CLAIMS_PER_OFFER:
            text = f"{limits.MAX_CLAIMS_PER_OFFER} claims hold the offer {request.offer!r} already"
            raise Unavailable(ErrorCode.OVERLOADED, text)
        if request.consumer not in lease.finished and len(lease.finished) >= 2 * limits.MAX_CONSUMERS:
            text = f"{len(lease.finished)} consumers have a part in the offer {request.offer!r} already"
            raise Unavailable(ErrorCode.OVERLOADED, text)
        if not self._offers.claim(lease):
            raise Unavailable(ErrorCode.OFFER_GONE, f"the offer {request.offer!r} has ended ({lease.reason})")
        lease.claims[key] = request
        self._held[key] = lease
        self._due.set(key, self._context.loop.time() + request.ttl)
        self._count(request, +1)

    def _grant(self, key: ClaimKey, lease: Lease) -> None:
        incarnation = self._context.settings.incarnation
        self._reply(key.sender, Grant(key.claim, lease.generation, lease.pool.epoch, incarnation))

    def _refuse(self, key: ClaimKey, peer: str, error: KvdError) -> None:
        self._context.metrics.claims.labels("refused").inc()
        self._end_span(key, "refused", error)
        if self._may_hear(peer, error):
            self._reply(key.sender, Refuse(key.claim, error.code, error.text))

    def _may_hear(self, peer: str, error: KvdError) -> bool:
        """Whether a peer gets this answer: one that has sent many wrong proofs does not hear of each any more.

        A right proof is answered all the same, or one worker's wrong tickets would hold up its neighbours' pulls.
        """
        return error.code is not ErrorCode.BAD_TICKET or self._wrong_proofs.take(peer, self._context.loop.time())

    # --- it is held -------------------------------------------------------------------------------------------------

    def _renew(self, sender: bytes, claims: tuple[int, ...]) -> None:
        now = self._context.loop.time()
        lost = []
        for number in claims:
            key = ClaimKey(sender, number)
            lease = self._held.get(key)
            if lease is not None:
                self._due.set(key, now + lease.claims[key].ttl)
            elif key not in self._waiting and key not in self._fenced:
                lost.append(number)
        if lost:
            self._reply(sender, Broken(tuple(lost), ErrorCode.LEASE_BROKEN, _NOT_HELD))

    def _fence(self, key: ClaimKey, peer: str, fence: Fence) -> None:
        error = self._check_fence(key, fence)
        if error is None:
            self._reply(key.sender, Held(key.claim))
        elif self._may_hear(peer, error):
            self._reply(key.sender, Broken((key.claim,), error.code, error.text))

    def _check_fence(self, key: ClaimKey, fence: Fence) -> KvdError | None:
        """Why the lease is not held under that generation; None where it is, and then this reader has finished."""
        error = self._broken.get(key)
        if fence.unclaimed is not None and key not in self._fenced and key not in self._held and error is None:
            self._begin_span(key, fence.unclaimed)
            error = self._hold_unclaimed(key, fence.unclaimed, fence.generation)
        lease = self._held.get(key)
        if lease is not None and lease.generation == fence.generation:
            self._fenced[key] = fence.generation
            self._ended(key)
            self._drop(key, finished=True)
        held = self._fenced.get(key) == fence.generation
        self._context.metrics.fences.labels("held" if held else "broken").inc()
        if held:
            self._end_span(key, "held")
            return None
        error = error or Unavailable(ErrorCode.LEASE_BROKEN, _NOT_HELD)
        self._end_span(key, "broken", error)
        return error

    def _hold_unclaimed(self, key: ClaimKey, request: Claim, generation: int) -> KvdError | None:
        """A read that was not claimed: the lease that its ticket named must be alive still, and be the same."""
        try:
            lease = self._lease_of(request)
            if lease is None or lease.generation != generation:
                return Unavailable(ErrorCode.OFFER_GONE, f"the offer {request.offer!r} has ended")
            self._hold(key, request, lease)
        except KvdError as error:
            return error
        return None

    # --- it ends ----------------------------------------------------------------------------------------------------

    def expired(self, key: ClaimKey) -> None:
        """A consumer went silent: its claim is broken, the others' are not."""
        if key in self._held:
            self._break(key, f"the claim was not renewed for {self._held[key].claims[key].ttl:g} s")
            self._drop(key, finished=False)

    def break_all(self, lease: Lease, why: str) -> None:
        """The lease has ended under its claims."""
        for key in list(lease.claims):
            self._break(key, why)
            self._take(key)

    def _drop(self, key: ClaimKey, *, finished: bool) -> None:
        """Takes a claim out of its lease, which ends or goes on."""
        if key not in self._held:
            return
        lease, request = self._take(key)
        if finished:
            lease.finish(request)
        if lease.is_read:
            self._offers.step(lease, Event.FINISHED, "read")
        elif not lease.claims:
            self._offers.unclaim(lease)

    def _take(self, key: ClaimKey) -> tuple[Lease, Claim]:
        lease = self._held.pop(key)
        self._due.unset(key)
        request = lease.claims.pop(key)
        self._count(request, -1)
        return lease, request

    def _break(self, key: ClaimKey, why: str) -> None:
        self._broken[key] = error = Unavailable(ErrorCode.LEASE_BROKEN, why)
        self._ended(key)
        self._end_span(key, "broken", error)
        self._untold.put((key, why))

    def tell_broken(self) -> None:
        """Tells each consumer's daemon which of its claims were broken."""
        claims: dict[tuple[bytes, str], list[int]] = {}
        for (sender, claim), why in self._untold.take():
            claims.setdefault((sender, why), []).append(claim)
        for (sender, why), numbers in claims.items():
            for start in range(0, len(numbers), limits.MAX_RENEWALS):
                some = tuple(numbers[start : start + limits.MAX_RENEWALS])
                self._reply(sender, Broken(some, ErrorCode.LEASE_BROKEN, why))

    def forget(self, key: ClaimKey) -> None:
        """Remembers no longer what became of it."""
        self._fenced.pop(key, None)
        self._broken.pop(key, None)

    # --- what is told -----------------------------------------------------------------------------------------------

    def _count(self, request: Claim, change: int) -> None:
        self._context.metrics.claims_active.set(len(self._held))
        if request.serve:
            self._served += change
            if self._served == max(0, change):
                self._expect_readers(self._served > 0)

    def _reply(self, sender: bytes, message: Grant | Refuse | Held | Broken | Settled) -> None:
        self._context.peers.answer(sender, message)

    def _begin_span(self, key: ClaimKey, request: Claim) -> None:
        if self._context.spans is not None and request.traceparent is not None and key not in self._spans:
            self._spans[key] = self._context.spans.claim(request)

    def _end_span(self, key: ClaimKey, outcome: str, error: KvdError | None = None) -> None:
        span = self._spans.pop(key, None)
        if span is not None:
            span.end(outcome, error)

    def report(self) -> dict[str, int]:
        """As a status tells of them."""
        return {"claims_held": len(self._held), "claims_waiting": len(self._waiting)}


def _cannot_come(request: Claim) -> KvdError:
    text = f"the producer's daemon is stopping, so that the offer {request.offer!r} cannot come any more"
    return Unavailable(ErrorCode.SHUTTING_DOWN, text)
