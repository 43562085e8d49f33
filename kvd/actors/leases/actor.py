"""Leases: what the workers of this daemon promised to hold, and who relies on it."""

from collections.abc import Callable

from msgspec import Struct

from kvd import limits
from kvd.actors.gateway.messages import Answer, Refusal, Reported
from kvd.actors.leases.claims import Claims
from kvd.actors.leases.messages import OfferBlocks, PeerRequest
from kvd.actors.leases.offers import ClaimKey, Lease, OfferKey, Offers
from kvd.actors.leases.tombstones import Tombstones
from kvd.actors.runtime.actor import Actor, handles
from kvd.actors.runtime.batch import Batch
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.messages import Drain, PoolDown, PoolUp, Quiesce, Report, Stop
from kvd.actors.scheduler.messages import CancelRequest
from kvd.errors import BadRequest, ErrorCode, KvdError
from kvd.memory.stamps import Stamps
from kvd.protocol.ticket import Ticket, TicketRank
from kvd.protocol.worker import Offer, Offered
from kvd.state.lease import Event

LAST_CALL_SECONDS = 0.5
"""How long a drain leaves offers that nobody has claimed: their tickets travel, and short reads are not claimed."""


class _OffersExpired(Struct, frozen=True, gc=False):
    """The time of some offers is over."""


class _ClaimsExpired(Struct, frozen=True, gc=False):
    """Some claims were not renewed."""


class _WaitsOver(Struct, frozen=True, gc=False):
    """Some claims have waited for long enough."""


class _LastCall(Struct, frozen=True, gc=False):
    pass


class _TellBroken(Struct, frozen=True, gc=False):
    """Claims were broken whose consumers have not been told."""


class _Sweep(Struct, frozen=True, gc=False):
    """Some tombstones are old."""


class LeasesActor(Actor):
    """Offers of workers, claims of peers, and who hears of what. A failure stops the daemon: a wrong lease is another
    prompt's tokens.
    """

    name = "leases"

    def __init__(
        self,
        context: ActorContext,
        peer_address: Callable[[], str],
        expect_readers: Callable[[bool], None],
        stamps: Stamps,
    ) -> None:
        super().__init__(context.dispatcher)
        self._context = context
        self._peer_address = peer_address
        self._tombstones: Tombstones[OfferKey | ClaimKey] = Tombstones(
            context.loop, context.settings.tombstone, limits.MAX_TOMBSTONES, self._forget, lambda: self.tell(_Sweep())
        )
        self._expired_offers: Batch[OfferKey] = Batch(lambda: self.tell(_OffersExpired()))
        self._expired_claims: Batch[ClaimKey] = Batch(lambda: self.tell(_ClaimsExpired()))
        self._waits_over: Batch[ClaimKey] = Batch(lambda: self.tell(_WaitsOver()))
        self._offers = Offers(
            self.name,
            context,
            stamps,
            expired=self._expired_offers.put,
            ended=self._tombstones.bury,
            break_claims=self._break_claims,
        )
        self._claims = Claims(
            context,
            self._offers,
            wait_over=self._waits_over.put,
            expired=self._expired_claims.put,
            ended=self._tombstones.bury,
            broke=lambda: self.tell(_TellBroken()),
            expect_readers=expect_readers,
        )

    # --- offers -----------------------------------------------------------------------------------------------------

    @handles(OfferBlocks)
    def offer(self, message: OfferBlocks) -> None:
        """A new lease; claims that came before it are answered now."""
        offer, worker = message.offer, message.pool.worker
        try:
            lease = self._offers.put(offer, message.pool)
        except KvdError as error:
            self._context.gateway.tell(Refusal(worker, offer.call, error))
            return
        self._context.gateway.tell(Answer(worker, Offered(offer.call, self._ticket(offer, lease))))
        self._claims.offered(lease)

    def _ticket(self, offer: Offer, lease: Lease) -> str:
        rank = TicketRank(
            daemon=self._context.settings.daemon,
            address=self._peer_address(),
            incarnation=self._context.settings.incarnation,
            pool=lease.pool.worker,
            offer=offer.offer,
            blocks=0,
            secret=offer.secret,
            generation=lease.generation,
            epoch=lease.pool.epoch,
            stamp=lease.stamp,
        )
        return Ticket(tokens=offer.tokens, ranks=(rank,), blocks=(offer.spans,)).encode()

    @handles(CancelRequest)
    def withdraw(self, message: CancelRequest) -> None:
        """The worker takes an offer back; `Released` follows, and no fence holds from here on."""
        cancel = message.cancel
        lease = self._offers.find(message.worker, cancel.request)
        if lease is None:
            error = BadRequest(ErrorCode.UNKNOWN_REQUEST, f"no pull and no offer is called {cancel.request!r}")
            self._context.gateway.tell(Refusal(message.worker, cancel.call, error))
            return
        self._offers.step(lease, Event.REVOKE, "withdrawn")

    @handles(_OffersExpired)
    def offers_expired(self, _message: _OffersExpired) -> None:
        """The time of offers is over: they end now, or with their last claim."""
        for key in self._expired_offers.take():
            lease = self._offers.find(*key)
            if lease is not None and self.loop.time() >= lease.expires:
                self._offers.step(lease, Event.EXPIRE, "expired")

    # --- claims -----------------------------------------------------------------------------------------------------

    def _break_claims(self, lease: Lease, why: str) -> None:
        self._claims.break_all(lease, why)

    @handles(PeerRequest)
    def peer_request(self, message: PeerRequest) -> None:
        """One ask of a consumer's daemon."""
        self._claims.asked(message)

    @handles(_WaitsOver)
    def waits_over(self, _message: _WaitsOver) -> None:
        """The offers that claims waited for did not come."""
        for key in self._waits_over.take():
            self._claims.wait_over(key)

    @handles(_ClaimsExpired)
    def claims_expired(self, _message: _ClaimsExpired) -> None:
        """Consumers went silent."""
        for key in self._expired_claims.take():
            self._claims.expired(key)

    @handles(_TellBroken)
    def tell_broken(self, _message: _TellBroken) -> None:
        """Many claims may have been broken at once: each consumer's daemon hears of all of its own together."""
        self._claims.tell_broken()

    # --- what has ended ---------------------------------------------------------------------------------------------

    @handles(_Sweep)
    def sweep(self, _message: _Sweep) -> None:
        """Whoever has not asked by now will not."""
        self._tombstones.sweep()

    def _forget(self, key: OfferKey | ClaimKey) -> None:
        if isinstance(key, ClaimKey):
            self._claims.forget(key)
        else:
            self._offers.forget(key)

    # --- pools, drain, status ---------------------------------------------------------------------------------------

    @handles(PoolUp)
    def pool_up(self, message: PoolUp) -> None:
        """Offers of this pool are welcome."""
        self._offers.pool_up(message.pool)

    @handles(PoolDown)
    def pool_down(self, message: PoolDown) -> None:
        """The pool is gone; it was quiet."""
        self._offers.pool_down(message.pool)

    @handles(Quiesce)
    def quiesce(self, message: Quiesce) -> None:
        """Withdraws what nobody reads, waits for (or breaks) what somebody does."""
        self._offers.quiesce(message.pool, force=message.force)

    @handles(Drain)
    def drain(self, _message: Drain) -> None:
        """Nothing new is offered, no claim waits any more; what stands ends when it is read, or after a last call."""
        self.tell_later(LAST_CALL_SECONDS, _LastCall())
        self._claims.refuse_waiting()
        self._offers.drain()

    @handles(_LastCall)
    def last_call(self, _message: _LastCall) -> None:
        """Offers that nobody claimed end."""
        self._offers.end_all("shutdown", claimed=False)

    @handles(Stop)
    def stop(self, _message: Stop) -> None:
        """Every lease ends, and its consumers are told."""
        self._offers.end_all("shutdown", claimed=True)

    @handles(Report)
    def report(self, message: Report) -> None:
        """Counts, and the last generation."""
        content = self._offers.report() | self._claims.report()
        self._context.gateway.tell(Reported(message.token, self.name, content))
