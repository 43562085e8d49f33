"""The offers of this daemon's workers: a lease for each that stands, and for a while for each that has ended."""

import hmac
from collections.abc import Callable
from typing import Final

from kvd import limits
from kvd.actors.completion.actor import CompletionActor
from kvd.actors.leases import content as growth
from kvd.actors.leases import lease as machine
from kvd.actors.leases.claim import OfferKey
from kvd.actors.leases.ended import Returns
from kvd.actors.leases.lease import Bounds, Effect, Event, Lease, State
from kvd.actors.runtime.actor import Actor, Component
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.deferred import Batch, Deadlines
from kvd.actors.runtime.pools import HeldBlocks, Hold, Pool, Size
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.memory.stamps import Stamps
from kvd.protocol import ticket
from kvd.protocol.peer import Claim
from kvd.protocol.status import LeaseStatus
from kvd.protocol.types import Spans
from kvd.protocol.worker import Extend, Offer, Released

_HOLDS: Final = tuple(machine.HOLD_OF.values())


class Offers(Component):
    """Leases by offer; each follows the table of `lease`.

    `quiet(pool)` is called when no offer of a pool stands (any more) that is to be quiesced. `remember(key, owner)` has
    `forget` called for an offer that has ended, after a while. `break_claims(lease, why)` breaks all claims of a lease.
    """

    def __init__(
        self,
        actor: Actor,
        context: ActorContext,
        stamps: Stamps,
        *,
        completion: CompletionActor,
        quiet: Callable[[Pool], None],
        remember: Callable[[OfferKey, str], None],
        break_claims: Callable[[Lease, str], None],
    ) -> None:
        self.actor = actor
        self._context = context
        self._stamps = stamps
        self._completion = completion
        self._quiet = quiet
        self._remember = remember
        self._break_claims = break_claims
        self._pools: dict[str, Pool] = {}
        self._quiescing: set[int] = set()
        self._leases: dict[OfferKey, Lease] = {}
        # No two runs of a daemon share a generation: incarnations lie further apart than a run has leases.
        self._last_generation = context.settings.incarnation
        self._in_claim = 0
        self._growing: dict[str, dict[OfferKey, Lease]] = {}
        """Offers that are not closed, by worker."""
        self.bounds, self._returns = Bounds(), Returns(actor, self._returned)
        expiring = Batch(actor, self._expired, lambda key: self._leases[key].weight if key in self._leases else 0)
        self._due: Deadlines[OfferKey] = Deadlines(context.loop, expiring.put, for_others=True)
        self._revoking: Batch[tuple[Lease, str, bool]] = Batch(actor, self._revoke, lambda each: each[0].weight)
        """Leases that are to end, why, and whether also if somebody reads them."""
        self._held = HeldBlocks(_HOLDS)
        context.metrics.watch_held(_HOLDS, self._held.of)
        self._draining = False

    # --- an offer begins --------------------------------------------------------------------------------------------

    def put(self, offer: Offer, pool: Pool) -> Lease:
        """A new lease.

        Raises:
            KvdError: the offer is refused; nothing has changed.

        """
        key = (pool.name, offer.offer)
        self._check(key, pool, offer)
        lease = Lease(
            key=key,
            pool=pool,
            generation=self._last_generation + 1,
            proof=ticket.proof(offer.secret, *key, offer.tokens, offer.spans),
            secret=offer.secret,
            consumers=offer.consumers,
            ttl=offer.ttl,
            expires=self._context.loop.time() + offer.ttl,
        )
        if offer.grows:
            self._growing.setdefault(pool.name, {})[key] = lease
        else:
            self.bounds.check_parts(lease)
            self._add(lease, growth.Event.CLOSE, offer.tokens, offer.spans, lease.proof)
        self._last_generation += 1
        self._leases[key] = lease
        self._count_held(lease, Hold.OFFERED)
        self.bounds.begin(lease)
        self._count_standing()
        self._due.set(key, lease.expires)
        return lease

    def _check(self, key: OfferKey, pool: Pool, offer: Offer) -> None:
        if self._draining:
            raise refusal(ErrorCode.SHUTTING_DOWN, "the daemon is stopping; nothing new can be offered")
        if self._pools.get(pool.name) is not pool or pool.id in self._quiescing:
            raise refusal(ErrorCode.POOL_BUSY, f"the pool {pool.name!r} is being given back")
        if offer.ttl <= 0:
            raise refusal(ErrorCode.BAD_MESSAGE, f"an offer's ttl is {offer.ttl} s; it must be above 0")
        if offer.grows and (offer.tokens or offer.spans):
            text = f"an offer that grows is opened with {offer.tokens} tokens and {len(offer.spans)} spans"
            raise refusal(ErrorCode.BAD_MESSAGE, f"{text}; open it without, then extend it")
        if (known := self._leases.get(key)) is not None and known.state not in machine.TABLE.final:
            raise refusal(ErrorCode.DUPLICATE_REQUEST, f"the offer {key[1]!r} stands already; use a new id")
        self.bounds.check_offer(pool.id)

    # --- it grows ---------------------------------------------------------------------------------------------------

    def extend(self, worker: str, more: Extend) -> Lease:
        """Adds blocks to an offer, and perhaps closes it.

        Raises:
            KvdError: the extension is refused; nothing has changed.

        """
        lease = self.find(worker, more.offer)
        if lease is None:
            raise refusal(ErrorCode.UNKNOWN_REQUEST, f"no offer is called {more.offer!r}; open it first")
        if lease.state in machine.TABLE.final:
            raise refusal(ErrorCode.OFFER_GONE, f"the offer {more.offer!r} has ended ({lease.reason})")
        spans = tuple(span for span in more.spans if span.ids)
        lease.content.check(more, spans, lease.pool.spec.groups)
        self._check_size(lease, spans)
        if not more.closes:  # any may be closed
            self.bounds.check_parts(lease)
        self._add(lease, growth.Event.CLOSE if more.closes else growth.Event.EXTEND, more.tokens, spans)
        lease.expires = self._context.loop.time() + lease.ttl
        self._due.set(lease.key, lease.expires)
        self.step(lease, Event.GROWN)
        return lease

    def _check_size(self, lease: Lease, spans: Spans) -> None:
        blocks = lease.size.blocks + lease.pool.blocks.size_of(spans).blocks
        if blocks > limits.MAX_BLOCKS_PER_REQUEST:
            text = f"the offer would have {blocks} blocks; the bound is {limits.MAX_BLOCKS_PER_REQUEST}"
            raise refusal(ErrorCode.TOO_LARGE, text)

    def _add(self, lease: Lease, event: growth.Event, tokens: int, spans: Spans, proof: bytes = b"") -> None:
        """Takes what is named together, which has been checked. `proof` is that of the whole offer, if it is known.

        Raises:
            Unavailable: see `BlocksInUse.offer`; nothing has changed.

        """
        pool, content = lease.pool, lease.content
        pool.blocks.offer(spans)
        step = growth.TABLE.step(content.state, event)
        content.state = step.state
        before = content.spans
        content.add(tokens, spans)
        self.bounds.parts[pool.id] += content.spans - before
        counted = lease.counted
        self._count_held(lease, None)
        more = pool.blocks.size_of(spans)
        lease.size = Size(lease.size.blocks + more.blocks, lease.size.bytes + more.bytes)
        self._count_held(lease, counted)
        if growth.Effect.PROVE in step.effects:
            content.proof = proof or ticket.proof(lease.secret, *lease.key, tokens, content.blocks)
            lease.stamp = self._stamps.put(ticket.stamp(lease.secret, lease.generation, content.proof, pool.epoch))
            lease.secret = b""
            self._grows_no_more(lease)

    def _grows_no_more(self, lease: Lease) -> None:
        growing = self._growing.get(lease.pool.name, {})
        if growing.pop(lease.key, None) is not None and not growing:
            del self._growing[lease.pool.name]

    def end_growing(self, worker: str) -> None:
        """Takes back what a worker whose session has ended has not closed; its process may be dead."""
        for lease in self._growing.get(worker, {}).values():
            self._revoking.put((lease, "withdrawn", True))

    # --- it is found ------------------------------------------------------------------------------------------------

    def find(self, worker: str, offer: str) -> Lease | None:
        """The lease of an offer, standing or remembered."""
        return self._leases.get((worker, offer))

    def is_over(self, lease: Lease) -> bool:
        """Whether it has ended, and its worker was told."""
        return lease.state in machine.TABLE.final and not lease.content.parts

    def for_claim(self, claim: Claim) -> Lease | None:
        """The lease that a claim is about, which may have ended; None if its offer may yet come.

        Raises:
            KvdError: `OFFER_GONE`, the lease that the ticket names has ended, or no such offer can come; `BAD_TICKET`,
                the proof is another offer's; `SHUTTING_DOWN`, nothing new is offered.

        """
        if claim.incarnation not in (0, self._context.settings.incarnation):
            text = f"the offer {claim.offer!r} was made to an earlier run of this daemon, which has ended"
            raise refusal(ErrorCode.OFFER_GONE, text)
        lease = self.find(claim.pool, claim.offer)
        if claim.generation and (lease is None or lease.generation != claim.generation):
            if not self._context.settings.incarnation < claim.generation <= self._last_generation:
                raise self._wrong_proof(f"the ticket names a lease of the offer {claim.offer!r} that never was")
            raise refusal(ErrorCode.OFFER_GONE, f"the offer {claim.offer!r} that the ticket names has ended")
        if lease is None:
            self._check_may_come(claim)
            return None
        if hmac.compare_digest(claim.proof, lease.proof):
            return lease
        if lease.state in machine.TABLE.final and not claim.generation:  # it was another offer of that name
            self._check_may_come(claim)
            return None
        raise self._wrong_proof(f"the ticket and the offer {claim.offer!r} differ in secret or blocks")

    def _wrong_proof(self, text: str) -> KvdError:
        self._context.metrics.wrong_proofs.inc()
        return refusal(ErrorCode.BAD_TICKET, f"{text}; pass the ticket on unchanged")

    def _check_may_come(self, claim: Claim) -> None:
        if self._draining:
            text = f"the producer's daemon is stopping, so the offer {claim.offer!r} cannot come any more"
            raise refusal(ErrorCode.SHUTTING_DOWN, text)
        if claim.pool not in self._pools:
            text = f"no worker {claim.pool!r} is attached here, so the offer {claim.offer!r} cannot come"
            raise refusal(ErrorCode.OFFER_GONE, text)

    # --- it is claimed, and ends ------------------------------------------------------------------------------------

    def claim(self, lease: Lease) -> bool:
        """Counts on one more claim; False if the lease has ended."""
        step = machine.TABLE.step(lease.state, Event.CLAIM)
        self._enter(lease, step.state)
        return Effect.GRANT in step.effects

    def unclaim(self, lease: Lease) -> None:
        """The last claim is gone, and consumers are to come: the lease goes on, unless its end waited for that."""
        self.step(lease, Event.UNCLAIMED, "expired")
        if self._draining or lease.pool.id in self._quiescing:
            self.step(lease, Event.REVOKE, "withdrawn")

    def _expired(self, keys: list[OfferKey]) -> None:
        """The time of these offers is over: they end now, or with their last claims."""
        for key in keys:
            if (lease := self._leases.get(key)) is not None and self._context.loop.time() >= lease.expires:
                self.step(lease, Event.EXPIRE, "expired")

    def step(self, lease: Lease, event: Event, reason: str = "") -> None:
        """Carries an event out. `reason` is for `Released`, if the event ends the lease."""
        step = machine.TABLE.step(lease.state, event)
        self._enter(lease, step.state)
        if Effect.RELEASE in step.effects:
            self._stamps.wipe(lease.stamp)  # before anybody is told: a stamp that is found proves that nobody was
        if Effect.BREAK in step.effects:
            self._break_claims(lease, f"the offer has ended ({reason})")
        if Effect.RELEASE in step.effects:
            lease.reason = reason
            self._grows_no_more(lease)
            self._due.unset(lease.key)
            self._remember(lease.key, f"worker {lease.key[0]}")
            self._context.metrics.offers.labels(reason).inc()
            self._returns.put(lease)

    def _returned(self, lease: Lease) -> None:
        """The blocks of an offer that has ended are its worker's again."""
        self.bounds.end(lease)
        lease.content.forget()
        self._count_standing()
        self._completion.notify(lease.key[0], Released(lease.key[1], lease.reason))
        self._check_quiet(lease.pool)

    def end_all(self, reason: str, *, claimed: bool) -> None:
        """Ends the leases that stand: all of them, or those that nobody has claimed."""
        self._revoke([(lease, reason, claimed) for lease in self._leases.values()])

    def forget(self, key: OfferKey) -> None:
        """Forgets an offer that has ended, unless its name has been offered again meanwhile."""
        if key in self._leases and self._leases[key].state in machine.TABLE.final:
            del self._leases[key]

    def _enter(self, lease: Lease, state: State) -> None:
        self._in_claim += (state in machine.IN_CLAIM) - (lease.state in machine.IN_CLAIM)
        if state is not lease.state:
            lease.state = state
            self._count_held(lease, machine.HOLD_OF.get(state))

    def _count_held(self, lease: Lease, hold: Hold | None) -> None:
        """Counts the blocks of a lease as what they stand for now; None once they are the worker's own again."""
        self._held.move(lease.size, lease.counted, hold)
        lease.counted = hold

    def _count_standing(self) -> None:
        self._context.metrics.leases_active.set(self.bounds.standing.total())
        self._check_idle()

    # --- pools, drain, status ---------------------------------------------------------------------------------------

    def pool_up(self, pool: Pool) -> None:
        """Offers of this pool are accepted from now on."""
        self._pools[pool.name] = pool

    def pool_down(self, pool: Pool, *, keys_end: bool) -> None:  # noqa: ARG002 - offers end with either
        """The pool is gone; it was quiet."""
        self._pools.pop(pool.name, None)
        self._quiescing.discard(pool.id)

    def quiesce(self, pool: Pool, _why: str, *, force: bool) -> None:
        """Withdraws the offers of a pool that nobody reads, waits for (or breaks) those that somebody does."""
        self._quiescing.add(pool.id)
        for lease in self._leases.values():
            if lease.pool.id == pool.id and lease.state not in machine.TABLE.final:
                self._revoking.put((lease, "withdrawn", force))
        self._check_quiet(pool)

    def leased_pools(self) -> frozenset[int]:
        """The ids of the pools of which offers stand."""
        return frozenset(self.bounds.standing)

    def _revoke(self, orders: list[tuple[Lease, str, bool]]) -> None:
        for lease, reason, claimed in orders:
            if claimed or not lease.claims:
                self.step(lease, Event.REVOKE, reason)

    def _check_quiet(self, pool: Pool) -> None:
        if pool.id in self._quiescing and not self.bounds.standing[pool.id]:
            self._quiet(pool)

    def drain(self) -> None:
        """Takes no new offers; calls `idle` when the last has ended."""
        self._draining = True
        self._check_idle()

    def _check_idle(self) -> None:
        if self._draining and not self.bounds.standing:
            self._context.idle(self.actor.name)

    def report(self, *, claims_held: int, claims_waiting: int) -> LeaseStatus:
        """The leases' part of a status, with what the claims tell."""
        return LeaseStatus(
            active=self.bounds.standing.total(),
            claimed=self._in_claim,
            claims_held=claims_held,
            claims_waiting=claims_waiting,
            blocks=self._held.report(),
            last_generation=self._last_generation,
        )
