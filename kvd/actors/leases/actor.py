"""Leases: what the workers of this daemon promised to hold, and which peers rely on it."""

from collections.abc import Callable

from kvd import limits
from kvd.actors.completion.actor import CompletionActor, Sessions
from kvd.actors.leases.claim import ClaimKey, OfferKey
from kvd.actors.leases.claims import Claims
from kvd.actors.leases.ended import Tombstones
from kvd.actors.leases.lease import Event, Lease
from kvd.actors.leases.offers import Offers
from kvd.actors.pools.actor import PoolsActor
from kvd.actors.runtime.actor import Actor, call
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.pools import Pool
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.memory.stamps import Stamps
from kvd.protocol.peer import LeaseAnswer
from kvd.protocol.status import LeaseStatus
from kvd.protocol.ticket import Ticket, TicketRank
from kvd.protocol.worker import Cancel, Extend, Extended, Offer, Offered

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
        *,
        completion: CompletionActor,
        sessions: Sessions,
        pools: PoolsActor,
        reply: Callable[[bytes, LeaseAnswer], None],
    ) -> None:
        super().__init__(context.dispatcher)
        self._context = context
        self._completion = completion
        self._sessions = sessions
        self._peer_address = peer_address
        self._tombstones: Tombstones[OfferKey | ClaimKey] = Tombstones(
            self, context.settings.tombstone, limits.MAX_TOMBSTONES, self._forget
        )
        remember = self._tombstones.bury
        self.offers = Offers(
            self,
            context,
            stamps,
            completion=completion,
            quiet=lambda pool: call(pools.quiesced, pool, self.name),
            remember=remember,
            break_claims=self._break_claims,
        )
        self.claims = Claims(self, context, self.offers, reply=reply, remember=remember, expect_readers=expect_readers)

    def _break_claims(self, lease: Lease, why: str) -> None:
        self.claims.break_all(lease, why)

    def _forget(self, key: OfferKey | ClaimKey) -> None:
        if isinstance(key, ClaimKey):
            self.claims.forget(key)
        else:
            self.offers.forget(key)

    def offer(self, pool: Pool, offer: Offer) -> None:
        """Makes a lease and answers with its ticket; answers the claims that came before it.

        The blocks of the offer have been checked.
        """
        try:
            lease = self.offers.put(offer, pool)
        except KvdError as error:
            self._sessions.refuse(pool.name, offer.call, error)
            return
        self._sessions.answer(pool.name, Offered(offer.call, self._ticket(offer, lease)))
        self.claims.offered(lease)

    def _ticket(self, offer: Offer, lease: Lease) -> str:
        rank = TicketRank(
            daemon=self._context.settings.daemon,
            address=self._peer_address(),
            incarnation=self._context.settings.incarnation,
            pool=lease.pool.name,
            offer=offer.offer,
            blocks=0,
            secret=offer.secret,
            generation=lease.generation,
            epoch=lease.pool.epoch,
            stamp=lease.stamp,
        )
        return Ticket(tokens=offer.tokens, ranks=(rank,), blocks=(offer.spans,), grows=offer.grows).encode()

    def extend(self, worker: str, more: Extend) -> None:
        """Adds blocks to an offer that grows, and perhaps closes it; tells its readers.

        The blocks have been checked.
        """
        try:
            lease = self.offers.extend(worker, more)
        except KvdError as error:
            self._sessions.refuse(worker, more.call, error)
            return
        self._sessions.answer(worker, Extended(more.call))
        self.claims.grown(lease)

    def withdraw(self, worker: str, cancel: Cancel) -> None:
        """Takes an offer back for its worker; `Released` follows, and no fence holds from here on."""
        lease = self.offers.find(worker, cancel.request)
        # One that is over may have been another offer of that name: the worker asks because the answer was lost.
        if lease is None or self.offers.is_over(lease):
            error = refusal(ErrorCode.UNKNOWN_REQUEST, f"no pull and no offer is called {cancel.request!r}")
            self._sessions.refuse(worker, cancel.call, error, self._completion.upcoming(worker))
            return
        self.offers.step(lease, Event.REVOKE, "withdrawn")

    # --- the daemon's end -------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Takes no new offers and refuses claims that wait; leases end when they are read, unclaimed ones soon."""
        self.later(LAST_CALL_SECONDS, self._last_call)
        self.offers.drain()
        self.claims.refuse_waiting()

    def _last_call(self) -> None:
        self.offers.end_all("shutdown", claimed=False)

    def stop(self) -> None:
        """Ends every lease; their consumers are told."""
        self.offers.end_all("shutdown", claimed=True)

    def report(self) -> LeaseStatus:
        """Its part of a status."""
        return self.offers.report(claims_held=self.claims.held, claims_waiting=self.claims.waiting)
