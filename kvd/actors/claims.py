"""The claims of other daemons on the leases of this one, and the producer's half of the fence.

Claims are kept by (sender, number), so that an ask that comes twice is answered the same both times; what has ended is
remembered for a while, so that a late ask gets its reason instead of a wait.
"""

from collections.abc import Callable

from kvd import limits
from kvd.actors.expiry import Expiry
from kvd.actors.house import House
from kvd.actors.messages import AnswerPeer, PeerAsks
from kvd.actors.offers import ClaimKey, Lease, Offers
from kvd.actors.spans import ClaimSpan
from kvd.actors.waiting import WaitingClaims
from kvd.errors import BadRequest, ErrorCode, KvdError, Unavailable
from kvd.protocol.peer import Broken, Claim, Fence, Grant, Held, Refuse, Release, Renew, Settle, Settled
from kvd.state.lease import Event


class Claims:
    """See the module's text.

    `wait_over` and `expired` are called when a claim's offer has not come, and when it was not renewed; `ended` when
    what became of it is to be remembered until `forget`. `expect_readers` is called when the first claim comes, and
    when the last ends, whose reads the transport of this daemon has a part in.
    """

    def __init__(
        self,
        house: House,
        offers: Offers,
        *,
        wait_over: Callable[[ClaimKey], None],
        expired: Callable[[ClaimKey], None],
        ended: Callable[[ClaimKey], None],
        expect_readers: Callable[[bool], None],
    ) -> None:
        self._house = house
        self._offers = offers
        self._ended = ended
        self._expect_readers = expect_readers
        self._held: dict[ClaimKey, Lease] = {}
        self._served = 0
        """Of them, those whose reads the transport has a part in."""
        self._due: Expiry[ClaimKey] = Expiry(house.loop, expired)
        self._waiting = WaitingClaims(house.loop, house.settings.claim_wait, wait_over)
        self._fenced: dict[ClaimKey, int] = {}
        """Claims whose fence held, with the generation: the same answer to the same ask."""
        self._broken: dict[ClaimKey, KvdError] = {}
        self._spans: dict[ClaimKey, ClaimSpan] = {}
        """Of the claims that are traced and have not ended."""

    def asked(self, message: PeerAsks) -> None:
        """One ask of a consumer's daemon."""
        sender = message.sender
        match message.request:
            case Claim() as claim:
                self._claim(ClaimKey(sender, claim.claim), claim)
            case Fence() as fence:
                self._fence(ClaimKey(sender, fence.claim), fence)
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

    def _claim(self, key: ClaimKey, request: Claim) -> None:
        held = self._held.get(key)
        if held is not None:
            self._due.set(key, self._house.loop.time() + request.ttl)
            self._grant(key, held)
        elif key in self._broken:
            self._refuse(key, self._broken[key])
        elif key in self._waiting:
            self._waiting.asked_again(key)
        elif key not in self._fenced:
            self._begin_span(key, request)
            self._claim_anew(key, request)

    def _claim_anew(self, key: ClaimKey, request: Claim) -> None:
        lease = self._offers.find(request.pool, request.offer)
        if request.incarnation not in (0, self._house.settings.incarnation):
            text = f"the offer {request.offer!r} was made to an earlier run of this daemon, which has ended"
            self._refuse(key, Unavailable(ErrorCode.OFFER_GONE, text))
        elif lease is not None:
            self._claim_lease(key, request, lease)
        elif self._offers.draining:
            self._refuse(key, _cannot_come(request))
        elif not self._offers.has_pool(request.pool):
            text = f"no worker {request.pool!r} is attached here, so that the offer {request.offer!r} cannot come"
            self._refuse(key, Unavailable(ErrorCode.OFFER_GONE, text))
        elif len(self._waiting) >= limits.MAX_CLAIMS_WAITING:
            text = f"{limits.MAX_CLAIMS_WAITING} claims wait for their offers already; try again later"
            self._refuse(key, Unavailable(ErrorCode.OVERLOADED, text))
        else:
            self._waiting.put(key, request)

    def offered(self, lease: Lease) -> None:
        """Claims that came before this offer are answered now."""
        for key, request in self._waiting.take_for(lease.key):
            self._claim_lease(key, request, lease)

    def wait_over(self, key: ClaimKey) -> None:
        """The offer that a claim waited for did not come."""
        request = self._waiting.take(key)
        if request is not None:
            text = f"no offer {request.offer!r} was made by {request.pool!r}"
            self._refuse(key, Unavailable(ErrorCode.OFFER_GONE, text))

    def refuse_waiting(self) -> None:
        """No claim waits any more: nothing new will be offered."""
        for key, request in self._waiting.take_all():
            self._refuse(key, _cannot_come(request))

    def _claim_lease(self, key: ClaimKey, request: Claim, lease: Lease) -> None:
        error = self._hold(key, request, lease)
        if error is None:
            self._house.metrics.claims.labels("granted").inc()
            if key in self._spans:
                self._spans[key].granted()
            self._grant(key, lease)
        else:
            self._refuse(key, error)

    def _hold(self, key: ClaimKey, request: Claim, lease: Lease) -> KvdError | None:
        """Adds a claim to a lease, or says why not."""
        if request.digest != lease.digest:
            text = f"the ticket and the offer {request.offer!r} name different blocks; pass the ticket on unchanged"
            return BadRequest(ErrorCode.BAD_TICKET, text)
        if len(lease.claims) >= limits.MAX_CLAIMS_PER_OFFER:
            text = f"{limits.MAX_CLAIMS_PER_OFFER} claims hold the offer {request.offer!r} already"
            return Unavailable(ErrorCode.OVERLOADED, text)
        if not self._offers.claim(lease):
            return Unavailable(ErrorCode.OFFER_GONE, f"the offer {request.offer!r} has ended ({lease.reason})")
        lease.claims[key] = request
        self._held[key] = lease
        self._due.set(key, self._house.loop.time() + request.ttl)
        self._count(request, +1)
        return None

    def _grant(self, key: ClaimKey, lease: Lease) -> None:
        self._reply(key.sender, Grant(key.claim, lease.generation, lease.pool.epoch))

    def _refuse(self, key: ClaimKey, error: KvdError) -> None:
        self._house.metrics.claims.labels("refused").inc()
        self._end_span(key, "refused", error)
        self._reply(key.sender, Refuse(key.claim, error.code, error.text))

    # --- it is held -------------------------------------------------------------------------------------------------

    def _renew(self, sender: bytes, claims: tuple[int, ...]) -> None:
        now = self._house.loop.time()
        for number in claims:
            key = ClaimKey(sender, number)
            lease = self._held.get(key)
            if lease is not None:
                self._due.set(key, now + lease.claims[key].ttl)
            elif key not in self._waiting and key not in self._fenced:
                self._say_broken(key)

    def _fence(self, key: ClaimKey, fence: Fence) -> None:
        if self._check_fence(key, fence):
            self._reply(key.sender, Held(key.claim))
        else:
            self._say_broken(key)

    def _check_fence(self, key: ClaimKey, fence: Fence) -> bool:
        """Whether the lease is held under that generation; if so, this reader has finished."""
        if fence.unclaimed is not None and key not in self._fenced and key not in self._held:
            self._begin_span(key, fence.unclaimed)
            self._hold_unclaimed(key, fence.unclaimed, fence.generation)
        lease = self._held.get(key)
        if lease is not None and lease.generation == fence.generation:
            self._fenced[key] = fence.generation
            self._ended(key)
            self._drop(key, finished=True)
        held = self._fenced.get(key) == fence.generation
        self._house.metrics.fences.labels("held" if held else "broken").inc()
        if held:
            self._end_span(key, "held")
        return held

    def _hold_unclaimed(self, key: ClaimKey, request: Claim, generation: int) -> None:
        """A read that was not claimed: the lease that its ticket named must be alive still, and be the same."""
        lease = self._offers.find(request.pool, request.offer)
        error: KvdError | None = Unavailable(ErrorCode.OFFER_GONE, f"the offer {request.offer!r} has ended")
        if lease is not None and lease.generation == generation:
            error = self._hold(key, request, lease)
        if error is not None:
            self._broken[key] = error
            self._ended(key)

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
            lease.finished.add(request.reader)
        if len(lease.finished) >= request.readers:
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
        self._broken[key] = Unavailable(ErrorCode.LEASE_BROKEN, why)
        self._ended(key)
        self._say_broken(key)

    def _say_broken(self, key: ClaimKey) -> None:
        unknown = Unavailable(ErrorCode.LEASE_BROKEN, "this daemon knows no such claim (any more)")
        error = self._broken.get(key, unknown)
        self._end_span(key, "broken", error)
        self._reply(key.sender, Broken(key.claim, error.code, error.text))

    def forget(self, key: ClaimKey) -> None:
        """Remembers no longer what became of it."""
        self._fenced.pop(key, None)
        self._broken.pop(key, None)

    # --- what is told -----------------------------------------------------------------------------------------------

    def _count(self, request: Claim, change: int) -> None:
        self._house.metrics.claims_active.set(len(self._held))
        if request.serve:
            self._served += change
            if self._served == max(0, change):
                self._expect_readers(self._served > 0)

    def _reply(self, sender: bytes, message: Grant | Refuse | Held | Broken | Settled) -> None:
        self._house.handshake.tell(AnswerPeer(sender, message))

    def _begin_span(self, key: ClaimKey, request: Claim) -> None:
        if self._house.spans is not None and request.traceparent is not None and key not in self._spans:
            self._spans[key] = self._house.spans.claim(request)

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
