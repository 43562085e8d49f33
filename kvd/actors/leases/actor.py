"""Leases: what the workers of this daemon promised to hold, and which peers rely on it."""

from collections.abc import Callable

from kvd import limits
from kvd.actors.gateway.messages import Reported
from kvd.actors.leases.claims import Claims
from kvd.actors.leases.messages import OfferBlocks
from kvd.actors.leases.offers import Offers
from kvd.actors.leases.records import ClaimKey, Lease, OfferKey
from kvd.actors.leases.tombstones import Tombstones
from kvd.actors.runtime.actor import Actor, handles
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.messages import Drain, Report, Stop
from kvd.actors.scheduler.messages import CancelRequest
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.memory.stamps import Stamps
from kvd.protocol.ticket import Ticket, TicketRank
from kvd.protocol.worker import Offer, Offered
from kvd.state.lease import Event

LAST_CALL_SECONDS = 0.5
"""How long a drain leaves offers that nobody has claimed: their tickets travel, and short reads are not claimed."""


class LeasesActor(Actor):
    """Offers of workers and claims of peers. A failure stops the daemon: a wrong lease is another prompt's tokens."""

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
            self, context.settings.tombstone, limits.MAX_TOMBSTONES, self._forget
        )
        remember = self._tombstones.bury
        self._offers = Offers(self, context, stamps, remember=remember, break_claims=self._break_claims)
        self._claims = Claims(self, context, self._offers, remember=remember, expect_readers=expect_readers)
        self.serve(self._offers)
        self.serve(self._claims)

    def _break_claims(self, lease: Lease, why: str) -> None:
        self._claims.break_all(lease, why)

    def _forget(self, key: OfferKey | ClaimKey) -> None:
        if isinstance(key, ClaimKey):
            self._claims.forget(key)
        else:
            self._offers.forget(key)

    @handles(OfferBlocks)
    def offer(self, message: OfferBlocks) -> None:
        """Makes a lease and answers with its ticket; answers the claims that came before it."""
        offer, worker = message.offer, message.pool.worker
        try:
            lease = self._offers.put(offer, message.pool)
        except KvdError as error:
            self._context.replies.refuse(worker, offer.call, error)
            return
        self._context.replies.answer(worker, Offered(offer.call, self._ticket(offer, lease)))
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
        """Takes an offer back for its worker; `Released` follows, and no fence holds from here on."""
        cancel = message.cancel
        lease = self._offers.find(message.worker, cancel.request)
        if lease is None:
            error = refusal(ErrorCode.UNKNOWN_REQUEST, f"no pull and no offer is called {cancel.request!r}")
            self._context.replies.refuse(message.worker, cancel.call, error)
            return
        self._offers.step(lease, Event.REVOKE, "withdrawn")

    @handles(Drain)
    def drain(self, _message: Drain) -> None:
        """Takes no new offers and refuses claims that wait; leases end when they are read, unclaimed ones soon."""
        self.later(LAST_CALL_SECONDS, self._last_call)
        self._offers.drain()
        self._claims.refuse_waiting()

    def _last_call(self) -> None:
        self._offers.end_all("shutdown", claimed=False)

    @handles(Stop)
    def stop(self, _message: Stop) -> None:
        """Ends every lease; their consumers are told."""
        self._offers.end_all("shutdown", claimed=True)

    @handles(Report)
    def report(self, message: Report) -> None:
        """Reports counts and the last generation."""
        content = self._offers.report() | self._claims.report()
        self._context.gateway.tell(Reported(message.token, self.name, content))
