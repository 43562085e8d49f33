"""Leases: what the workers of this daemon promised to hold, who claimed it, and the producer's half of the fence.

A lease follows `kvd.state.lease`. Claims are kept by (sender, number), so that an ask that comes twice is answered the
same both times; what has ended is remembered for a while, so that a late ask gets its reason instead of a wait.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct

from kvd import limits
from kvd.actors.actor import Actor, handles
from kvd.actors.expiry import Expiry
from kvd.actors.house import House
from kvd.actors.messages import (
    Answer,
    AnswerPeer,
    CancelRequest,
    Drain,
    Notify,
    OfferBlocks,
    PeerAsks,
    Pool,
    PoolDown,
    PoolUp,
    Quiesce,
    Quiet,
    Refusal,
    Report,
    Reported,
    Stop,
)
from kvd.actors.spans import ClaimSpan
from kvd.actors.tombstones import Tombstones
from kvd.errors import BadRequest, ErrorCode, KvdError, Unavailable
from kvd.memory.stamps import Stamps
from kvd.protocol import ticket
from kvd.protocol.peer import Broken, Claim, Fence, Grant, Held, Refuse, Release, Renew, Settle, Settled
from kvd.protocol.ticket import Ticket, TicketRank
from kvd.protocol.worker import Offered, Released
from kvd.state import lease as machine
from kvd.state.lease import Effect, Event, State

_LAST_CALL_SECONDS = 0.5
"""How long a drain leaves offers that nobody has claimed: their tickets travel, and short reads are not claimed."""

OfferKey = tuple[str, str]
"""(worker, offer)."""


class ClaimKey(NamedTuple):
    """A claim of a peer: its routing id, which is new with each incarnation, and its number."""

    sender: bytes
    claim: int


@dataclass(slots=True)
class _Lease:
    key: OfferKey
    pool: Pool
    generation: int
    digest: int
    blocks: int
    expires: float
    stamp: int
    """The word in which its stamp lies while it is alive, 0 for none."""
    state: State = machine.TABLE.initial
    reason: str = ""
    """Why it ended, in the words of `Released.reason`."""
    claims: dict[ClaimKey, Claim] = field(default_factory=dict)
    """Those that are held."""
    finished: set[int] = field(default_factory=set)
    """Readers that have all they wanted."""


class _OfferExpired(Struct, frozen=True, gc=False):
    key: OfferKey


class _ClaimExpired(Struct, frozen=True, gc=False):
    key: ClaimKey


class _WaitOver(Struct, frozen=True, gc=False):
    key: ClaimKey


class _LastCall(Struct, frozen=True, gc=False):
    pass


class _Sweep(Struct, frozen=True, gc=False):
    """Some tombstones are old."""


class LeasesActor(Actor):
    """See the module's text. A failure stops the daemon: a wrong lease is another prompt's tokens."""

    name = "leases"

    def __init__(
        self,
        house: House,
        peer_address: Callable[[], str],
        expect_readers: Callable[[bool], None],
        stamps: Stamps,
    ) -> None:
        super().__init__(house.post)
        self._house = house
        self._stamps = stamps
        self._peer_address = peer_address
        self._expect_readers = expect_readers
        self._pools: dict[str, Pool] = {}
        self._leases: dict[OfferKey, _Lease] = {}
        self._held: dict[ClaimKey, _Lease] = {}
        self._waiting: dict[ClaimKey, Claim] = {}
        self._spans: dict[ClaimKey, ClaimSpan] = {}
        """Of the claims that are traced and have not ended."""
        self._waiting_for: dict[OfferKey, dict[ClaimKey, None]] = {}
        self._fenced: dict[ClaimKey, int] = {}
        """Claims whose fence held, with the generation: the same answer to the same ask."""
        self._broken: dict[ClaimKey, KvdError] = {}
        # No two runs of a daemon share a generation: incarnations lie further apart than a run has leases.
        self._last_generation = house.settings.incarnation
        self._active = 0
        self._in_claim = 0
        self._standing: Counter[int] = Counter()
        """Offers that stand, by the id of their pool."""
        self._served = 0
        """Claims that are held and whose reads the transport has a part in."""
        self._quiescing: dict[int, Pool] = {}
        self._draining = False
        self._offers_due: Expiry[OfferKey] = Expiry(house.loop, lambda key: self.tell(_OfferExpired(key)))
        self._claims_due: Expiry[ClaimKey] = Expiry(house.loop, lambda key: self.tell(_ClaimExpired(key)))
        self._waits_due: Expiry[ClaimKey] = Expiry(house.loop, lambda key: self.tell(_WaitOver(key)))
        self._tombstones: Tombstones[OfferKey | ClaimKey] = Tombstones(
            house.loop, house.settings.tombstone, limits.MAX_TOMBSTONES, self._forget, lambda: self.tell(_Sweep())
        )

    # --- offers -----------------------------------------------------------------------------------------------------

    @handles(OfferBlocks)
    def offer(self, message: OfferBlocks) -> None:
        """A new lease; claims that came before it are answered now."""
        offer, pool = message.offer, message.pool
        key = (pool.worker, offer.offer)
        refusal = self._why_not(key, pool, offer.ttl)
        if refusal is not None:
            self._house.gateway.tell(Refusal(pool.worker, offer.call, refusal))
            return
        self._last_generation += 1
        blocks = sum(len(span.ids) for span in offer.spans) // 4
        content = ticket.digest(offer.tokens, offer.spans)
        lease = _Lease(
            key=key,
            pool=pool,
            generation=self._last_generation,
            digest=content,
            blocks=blocks,
            expires=self.loop.time() + offer.ttl,
            stamp=self._stamps.put(ticket.stamp(self._last_generation, content)),
        )
        self._leases[key] = lease
        self._set_active(pool.id, +1)
        self._offers_due.set(key, lease.expires)
        rank = TicketRank(
            daemon=self._house.settings.daemon,
            address=self._peer_address(),
            incarnation=self._house.settings.incarnation,
            pool=pool.worker,
            offer=offer.offer,
            blocks=0,
            generation=lease.generation,
            epoch=pool.epoch,
            stamp=lease.stamp,
        )
        text = Ticket(tokens=offer.tokens, ranks=(rank,), blocks=(offer.spans,)).encode()
        self._house.gateway.tell(Answer(pool.worker, Offered(offer.call, text)))
        for claim_key in self._waiting_for.pop(key, {}):
            self._waits_due.unset(claim_key)
            self._claim_lease(claim_key, self._waiting.pop(claim_key), lease)

    def _why_not(self, key: OfferKey, pool: Pool, ttl: float) -> KvdError | None:
        if self._draining:
            return Unavailable(ErrorCode.SHUTTING_DOWN, "the daemon is stopping; nothing new can be offered")
        if self._pools.get(pool.worker) is not pool or pool.id in self._quiescing:
            return Unavailable(ErrorCode.WRONG_STATE, f"the pool {pool.worker!r} is being given back")
        if ttl <= 0:
            return BadRequest(ErrorCode.BAD_MESSAGE, f"an offer's ttl is {ttl} s; it must be above 0")
        known = self._leases.get(key)
        if known is not None and known.state not in machine.TABLE.final:
            return BadRequest(ErrorCode.DUPLICATE_REQUEST, f"the offer {key[1]!r} stands already; use a new id")
        if self._standing[pool.id] >= limits.MAX_REQUESTS_PER_WORKER:
            text = f"{self._standing[pool.id]} offers of this worker stand, the bound; wait until some are released"
            return Unavailable(ErrorCode.OVERLOADED, text)
        return None

    @handles(CancelRequest)
    def withdraw(self, message: CancelRequest) -> None:
        """The worker takes an offer back; `Released` follows, and no fence holds from here on."""
        lease = self._leases.get((message.worker, message.cancel.request))
        if lease is None:
            text = f"no pull and no offer is called {message.cancel.request!r}"
            error = BadRequest(ErrorCode.UNKNOWN_REQUEST, text)
            self._house.gateway.tell(Refusal(message.worker, message.cancel.call, error))
            return
        self._step(lease, Event.REVOKE, "withdrawn")

    @handles(_OfferExpired)
    def offer_expired(self, message: _OfferExpired) -> None:
        """The time of an offer is over: it ends now, or with its last claim."""
        lease = self._leases.get(message.key)
        if lease is not None:
            self._step(lease, Event.EXPIRE, "expired")

    # --- claims -----------------------------------------------------------------------------------------------------

    @handles(PeerAsks)
    def peer_asks(self, message: PeerAsks) -> None:
        """One ask of a consumer's daemon."""
        sender = message.sender
        match message.request:
            case Claim() as claim:
                self._claimed(ClaimKey(sender, claim.claim), claim)
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
                self._stop_waiting(key)
                self._drop_claim(key, finished=release.finished)

    def _claimed(self, key: ClaimKey, request: Claim) -> None:
        held = self._held.get(key)
        if held is not None:
            self._claims_due.set(key, self.loop.time() + request.ttl)
            self._grant(key, held)
        elif key in self._broken:
            self._refuse(key, self._broken[key])
        elif key in self._waiting:
            self._waits_due.set(key, self.loop.time() + self._house.settings.claim_wait)
        elif key not in self._fenced:
            self._claim(key, request)

    def _claim(self, key: ClaimKey, request: Claim) -> None:
        self._begin_span(key, request)
        ours = self._house.settings.incarnation
        if request.incarnation not in (0, ours):
            text = f"the offer {request.offer!r} was made to an earlier run of this daemon, which has ended"
            self._refuse(key, Unavailable(ErrorCode.OFFER_GONE, text))
            return
        offer_key = (request.pool, request.offer)
        lease = self._leases.get(offer_key)
        if lease is not None:
            self._claim_lease(key, request, lease)
        elif self._draining:
            self._refuse(key, self._cannot_come(request))
        elif request.pool not in self._pools:
            text = f"no worker {request.pool!r} is attached here, so that the offer {request.offer!r} cannot come"
            self._refuse(key, Unavailable(ErrorCode.OFFER_GONE, text))
        elif len(self._waiting) >= limits.MAX_CLAIMS_WAITING:
            text = f"{limits.MAX_CLAIMS_WAITING} claims wait for their offers already; try again later"
            self._refuse(key, Unavailable(ErrorCode.OVERLOADED, text))
        else:
            self._waiting[key] = request
            self._waiting_for.setdefault(offer_key, {})[key] = None
            self._waits_due.set(key, self.loop.time() + self._house.settings.claim_wait)

    def _claim_lease(self, key: ClaimKey, request: Claim, lease: _Lease) -> None:
        error = self._hold(key, request, lease)
        if error is None:
            self._house.metrics.claims.labels("granted").inc()
            if key in self._spans:
                self._spans[key].granted()
            self._grant(key, lease)
        else:
            self._refuse(key, error)

    def _hold(self, key: ClaimKey, request: Claim, lease: _Lease) -> KvdError | None:
        """Adds a claim to a lease, or says why not."""
        if request.digest != lease.digest:
            text = f"the ticket and the offer {request.offer!r} name different blocks; pass the ticket on unchanged"
            return BadRequest(ErrorCode.BAD_TICKET, text)
        if len(lease.claims) >= limits.MAX_CLAIMS_PER_OFFER:
            text = f"{limits.MAX_CLAIMS_PER_OFFER} claims hold the offer {request.offer!r} already"
            return Unavailable(ErrorCode.OVERLOADED, text)
        step = machine.TABLE.step(lease.state, Event.CLAIM)
        self._enter(lease, step.state)
        if Effect.REFUSE in step.effects:
            return Unavailable(ErrorCode.OFFER_GONE, f"the offer {request.offer!r} has ended ({lease.reason})")
        lease.claims[key] = request
        self._held[key] = lease
        self._claims_due.set(key, self.loop.time() + request.ttl)
        self._count_claims(request, +1)
        return None

    def _grant(self, key: ClaimKey, lease: _Lease) -> None:
        self._reply(key.sender, Grant(key.claim, lease.generation, lease.pool.epoch))

    def _refuse(self, key: ClaimKey, error: KvdError) -> None:
        self._house.metrics.claims.labels("refused").inc()
        self._end_span(key, "refused", error)
        self._reply(key.sender, Refuse(key.claim, error.code, error.text))

    @handles(_WaitOver)
    def wait_over(self, message: _WaitOver) -> None:
        """The offer that a claim waited for did not come."""
        request = self._stop_waiting(message.key)
        if request is not None:
            text = f"no offer {request.offer!r} was made by {request.pool!r}"
            self._refuse(message.key, Unavailable(ErrorCode.OFFER_GONE, text))

    def _stop_waiting(self, key: ClaimKey) -> Claim | None:
        request = self._waiting.pop(key, None)
        if request is not None:
            self._waits_due.unset(key)
            waiting = self._waiting_for[request.pool, request.offer]
            del waiting[key]
            if not waiting:
                del self._waiting_for[request.pool, request.offer]
        return request

    def _renew(self, sender: bytes, claims: tuple[int, ...]) -> None:
        now = self.loop.time()
        for number in claims:
            key = ClaimKey(sender, number)
            lease = self._held.get(key)
            if lease is not None:
                self._claims_due.set(key, now + lease.claims[key].ttl)
            elif key not in self._waiting and key not in self._fenced:
                self._say_broken(key)

    def _say_broken(self, key: ClaimKey) -> None:
        unknown = Unavailable(ErrorCode.LEASE_BROKEN, "this daemon knows no such claim (any more)")
        error = self._broken.get(key, unknown)
        self._end_span(key, "broken", error)
        self._reply(key.sender, Broken(key.claim, error.code, error.text))

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
            self._tombstones.bury(key)
            self._drop_claim(key, finished=True)
        held = self._fenced.get(key) == fence.generation
        self._house.metrics.fences.labels("held" if held else "broken").inc()
        if held:
            self._end_span(key, "held")
        return held

    def _hold_unclaimed(self, key: ClaimKey, request: Claim, generation: int) -> None:
        """A read that was not claimed: the lease that its ticket named must be alive still, and be the same."""
        lease = self._leases.get((request.pool, request.offer))
        error: KvdError | None = Unavailable(ErrorCode.OFFER_GONE, f"the offer {request.offer!r} has ended")
        if lease is not None and lease.generation == generation:
            error = self._hold(key, request, lease)
        if error is not None:
            self._broken[key] = error
            self._tombstones.bury(key)

    @handles(_ClaimExpired)
    def claim_expired(self, message: _ClaimExpired) -> None:
        """A consumer went silent: its claim is broken, the others' are not."""
        if message.key in self._held:
            ttl = self._held[message.key].claims[message.key].ttl
            self._break(message.key, f"the claim was not renewed for {ttl:g} s")
            self._drop_claim(message.key, finished=False)

    def _drop_claim(self, key: ClaimKey, *, finished: bool) -> None:
        """Takes a claim out of its lease, which ends or goes on."""
        lease = self._held.pop(key, None)
        if lease is None:
            return
        self._claims_due.unset(key)
        request = lease.claims.pop(key)
        self._count_claims(request, -1)
        if finished:
            lease.finished.add(request.reader)
        if len(lease.finished) >= request.readers:
            self._step(lease, Event.FINISHED, "read")
        elif not lease.claims:
            self._step(lease, Event.UNCLAIMED, "")
            if self._draining or lease.pool.id in self._quiescing:
                self._step(lease, Event.REVOKE, "withdrawn")
            elif self.loop.time() >= lease.expires:
                self._step(lease, Event.EXPIRE, "expired")

    def _break(self, key: ClaimKey, why: str) -> None:
        self._broken[key] = Unavailable(ErrorCode.LEASE_BROKEN, why)
        self._tombstones.bury(key)
        self._say_broken(key)

    def _begin_span(self, key: ClaimKey, request: Claim) -> None:
        if self._house.spans is not None and request.traceparent is not None and key not in self._spans:
            self._spans[key] = self._house.spans.claim(request)

    def _end_span(self, key: ClaimKey, outcome: str, error: KvdError | None = None) -> None:
        span = self._spans.pop(key, None)
        if span is not None:
            span.end(outcome, error)

    # --- the machine's effects --------------------------------------------------------------------------------------

    def _step(self, lease: _Lease, event: Event, reason: str) -> None:
        step = machine.TABLE.step(lease.state, event)
        self._enter(lease, step.state)
        if Effect.RELEASE in step.effects:
            self._stamps.wipe(lease.stamp)  # before anybody is told: who finds the stamp knows that nobody was
        if Effect.BREAK in step.effects:
            for key in list(lease.claims):
                self._break(key, f"the offer {lease.key[1]!r} has ended ({reason})")
                del self._held[key]
                self._claims_due.unset(key)
                self._count_claims(lease.claims.pop(key), -1)
        if Effect.RELEASE in step.effects:
            lease.reason = reason
            self._set_active(lease.pool.id, -1)
            self._offers_due.unset(lease.key)
            self._tombstones.bury(lease.key)
            self._house.metrics.offers.labels(reason).inc()
            self._house.completion.tell(Notify(lease.key[0], Released(lease.key[1], reason)))
            self._check_quiet(lease.pool.id)

    @handles(_Sweep)
    def sweep(self, _message: _Sweep) -> None:
        """Whoever has not asked by now will not."""
        self._tombstones.sweep()

    def _forget(self, key: OfferKey | ClaimKey) -> None:
        if isinstance(key, ClaimKey):
            self._fenced.pop(key, None)
            self._broken.pop(key, None)
        elif key in self._leases and self._leases[key].state in machine.TABLE.final:
            del self._leases[key]

    def _enter(self, lease: _Lease, state: State) -> None:
        self._in_claim += (state is State.CLAIMED) - (lease.state is State.CLAIMED)
        lease.state = state

    def _set_active(self, pool: int, change: int) -> None:
        self._active += change
        self._standing[pool] += change
        if not self._standing[pool]:
            del self._standing[pool]
        self._house.metrics.leases_active.set(self._active)
        if self._draining and self._active == 0:
            self._house.idle(self.name)

    def _count_claims(self, request: Claim, change: int) -> None:
        self._house.metrics.claims_active.set(len(self._held))
        if request.serve:
            self._served += change
            if self._served == max(0, change):
                self._expect_readers(self._served > 0)

    def _reply(self, sender: bytes, message: Grant | Refuse | Held | Broken | Settled) -> None:
        self._house.handshake.tell(AnswerPeer(sender, message))

    # --- pools, drain, status ---------------------------------------------------------------------------------------

    @handles(PoolUp)
    def pool_up(self, message: PoolUp) -> None:
        """Offers of this pool are welcome."""
        self._pools[message.pool.worker] = message.pool

    @handles(PoolDown)
    def pool_down(self, message: PoolDown) -> None:
        """The pool is gone; it was quiet."""
        self._pools.pop(message.pool.worker, None)
        self._quiescing.pop(message.pool.id, None)

    @handles(Quiesce)
    def quiesce(self, message: Quiesce) -> None:
        """Withdraws what nobody reads, waits for (or breaks) what somebody does."""
        pool = next(pool for pool in self._pools.values() if pool.id == message.pool)
        self._quiescing[message.pool] = pool
        for lease in [lease for lease in self._leases.values() if lease.pool.id == message.pool]:
            if message.force or not lease.claims:
                self._step(lease, Event.REVOKE, "withdrawn")
        self._check_quiet(message.pool)

    def _check_quiet(self, pool: int) -> None:
        if pool not in self._quiescing:
            return
        alive = (lease.state not in machine.TABLE.final for lease in self._leases.values() if lease.pool.id == pool)
        if not any(alive):
            self._house.pools.tell(Quiet(pool, self.name))

    @handles(Drain)
    def drain(self, _message: Drain) -> None:
        """Nothing new is offered, no claim waits any more; what stands ends when it is read, or after a last call."""
        self._draining = True
        self.tell_later(_LAST_CALL_SECONDS, _LastCall())
        for key in list(self._waiting):
            request = self._stop_waiting(key)
            if request is not None:
                self._refuse(key, self._cannot_come(request))
        if self._active == 0:
            self._house.idle(self.name)

    @handles(_LastCall)
    def last_call(self, _message: _LastCall) -> None:
        """Offers that nobody claimed end."""
        for lease in list(self._leases.values()):
            if not lease.claims:
                self._step(lease, Event.REVOKE, "shutdown")

    @staticmethod
    def _cannot_come(request: Claim) -> KvdError:
        text = f"the producer's daemon is stopping, so that the offer {request.offer!r} cannot come any more"
        return Unavailable(ErrorCode.SHUTTING_DOWN, text)

    @handles(Stop)
    def stop(self, _message: Stop) -> None:
        """Every lease ends, and its consumers are told."""
        for lease in list(self._leases.values()):
            self._step(lease, Event.REVOKE, "shutdown")

    @handles(Report)
    def report(self, message: Report) -> None:
        """Counts, and the oldest lease."""
        content = {
            "active": self._active,
            "claimed": self._in_claim,
            "claims_held": len(self._held),
            "claims_waiting": len(self._waiting),
            "last_generation": self._last_generation,
        }
        self._house.gateway.tell(Reported(message.token, self.name, content))
