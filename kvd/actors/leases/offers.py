"""The offers of this daemon's workers: a lease for each that stands, and for a while for each that has ended."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvd import limits
from kvd.actors.completion.messages import Notify
from kvd.actors.pools.messages import Quiesced
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.deadlines import Deadlines
from kvd.actors.runtime.messages import Pool
from kvd.errors import BadRequest, ErrorCode, Unavailable
from kvd.memory.stamps import Stamps
from kvd.protocol import ticket
from kvd.protocol.peer import Claim
from kvd.protocol.worker import Offer, Released
from kvd.state import lease as machine
from kvd.state.lease import Effect, Event, State

OfferKey = tuple[str, str]
"""(worker, offer)."""


class ClaimKey(NamedTuple):
    """A claim of a peer: its routing id, which is new with each incarnation, and its number."""

    sender: bytes
    claim: int


@dataclass(slots=True)
class Lease:
    """What was promised with one offer. `expires` is in seconds on the loop's clock."""

    key: OfferKey
    pool: Pool
    generation: int
    proof: bytes = field(repr=False)
    """What a claim has to show."""
    consumers: int
    """How many may finish before it ends, 0 for any number."""
    expires: float
    stamp: int
    """The word in which its stamp lies while it is alive, 0 for none."""
    state: State = machine.TABLE.initial
    reason: str = ""
    """Why it ended, in the words of `Released.reason`."""
    claims: dict[ClaimKey, Claim] = field(default_factory=dict)
    """Those that are held."""
    finished: dict[str, set[int]] = field(default_factory=dict)
    """Readers that have all they wanted, by consumer; not kept where consumers are not counted."""
    done: set[str] = field(default_factory=set)
    """Consumers all of whose readers have."""

    def finish(self, claim: Claim) -> None:
        """One reader has all it wanted."""
        if self.consumers:
            readers = self.finished.setdefault(claim.consumer, set())
            readers.add(claim.reader)
            if len(readers) >= claim.readers:
                self.done.add(claim.consumer)

    @property
    def is_read(self) -> bool:
        """Whether as many consumers have finished as were offered it, and none that has not is at it."""
        enough = 0 < self.consumers <= len(self.done)
        return enough and all(claim.consumer in self.done for claim in self.claims.values())


class Offers:
    """Leases by offer; each follows `kvd.state.lease`.

    `owner` is the actor that these belong to. `expired` is called when the time of an offer is over, `ended` when it is
    a thing of the past, to be remembered until `forget`. `break_claims(lease, why)` is to take all claims from a lease.
    """

    def __init__(
        self,
        owner: str,
        context: ActorContext,
        stamps: Stamps,
        *,
        expired: Callable[[OfferKey], None],
        ended: Callable[[OfferKey], None],
        break_claims: Callable[[Lease, str], None],
    ) -> None:
        self._owner = owner
        self._context = context
        self._stamps = stamps
        self._ended = ended
        self._break_claims = break_claims
        self._pools: dict[str, Pool] = {}
        self._quiescing: set[int] = set()
        self._leases: dict[OfferKey, Lease] = {}
        # No two runs of a daemon share a generation: incarnations lie further apart than a run has leases.
        self._last_generation = context.settings.incarnation
        self._active = 0
        self._in_claim = 0
        self._standing: Counter[int] = Counter()
        """Offers that stand, by the id of their pool."""
        self._due: Deadlines[OfferKey] = Deadlines(context.loop, expired)
        self.draining = False

    # --- an offer begins --------------------------------------------------------------------------------------------

    def put(self, offer: Offer, pool: Pool) -> Lease:
        """A new lease.

        Raises:
            KvdError: the offer is refused; nothing has changed.

        """
        key = (pool.worker, offer.offer)
        self._check(key, pool, offer.ttl)
        self._last_generation += 1
        proof = ticket.proof(offer.secret, pool.worker, offer.offer, offer.tokens, offer.spans)
        lease = Lease(
            key=key,
            pool=pool,
            generation=self._last_generation,
            proof=proof,
            consumers=offer.consumers,
            expires=self._context.loop.time() + offer.ttl,
            stamp=self._stamps.put(ticket.stamp(offer.secret, self._last_generation, proof)),
        )
        self._leases[key] = lease
        self._count_standing(pool.id, +1)
        self._due.set(key, lease.expires)
        return lease

    def _check(self, key: OfferKey, pool: Pool, ttl: float) -> None:
        if self.draining:
            raise Unavailable(ErrorCode.SHUTTING_DOWN, "the daemon is stopping; nothing new can be offered")
        if self._pools.get(pool.worker) is not pool or pool.id in self._quiescing:
            raise Unavailable(ErrorCode.WRONG_STATE, f"the pool {pool.worker!r} is being given back")
        if ttl <= 0:
            raise BadRequest(ErrorCode.BAD_MESSAGE, f"an offer's ttl is {ttl} s; it must be above 0")
        known = self._leases.get(key)
        if known is not None and known.state not in machine.TABLE.final:
            raise BadRequest(ErrorCode.DUPLICATE_REQUEST, f"the offer {key[1]!r} stands already; use a new id")
        if self._standing[pool.id] >= limits.MAX_REQUESTS_PER_WORKER:
            text = f"{self._standing[pool.id]} offers of this worker stand, the bound; wait until some are released"
            raise Unavailable(ErrorCode.OVERLOADED, text)

    def find(self, worker: str, offer: str) -> Lease | None:
        """The lease of an offer, standing or remembered."""
        return self._leases.get((worker, offer))

    # --- it is claimed, and ends ------------------------------------------------------------------------------------

    def claim(self, lease: Lease) -> bool:
        """One more reader relies on it; False where it has ended."""
        step = machine.TABLE.step(lease.state, Event.CLAIM)
        self._enter(lease, step.state)
        return Effect.GRANT in step.effects

    def unclaim(self, lease: Lease) -> None:
        """The last claim is gone, and consumers are to come: it stands on, unless its end waited for that."""
        self.step(lease, Event.UNCLAIMED)
        if self.draining or lease.pool.id in self._quiescing:
            self.step(lease, Event.REVOKE, "withdrawn")
        elif self._context.loop.time() >= lease.expires:
            self.step(lease, Event.EXPIRE, "expired")

    def step(self, lease: Lease, event: Event, reason: str = "") -> None:
        """What the table says. `reason` is for `Released`, where the event ends the lease."""
        step = machine.TABLE.step(lease.state, event)
        self._enter(lease, step.state)
        if Effect.RELEASE in step.effects:
            self._stamps.wipe(lease.stamp)  # before anybody is told: who finds the stamp knows that nobody was
        if Effect.BREAK in step.effects:
            self._break_claims(lease, f"the offer has ended ({reason})")
        if Effect.RELEASE in step.effects:
            lease.reason = reason
            self._count_standing(lease.pool.id, -1)
            self._due.unset(lease.key)
            self._ended(lease.key)
            self._context.metrics.offers.labels(reason).inc()
            self._context.completion.tell(Notify(lease.key[0], Released(lease.key[1], reason)))
            self._check_quiet(lease.pool)

    def end_all(self, reason: str, *, claimed: bool) -> None:
        """Ends what stands: all of it, or what is not `claimed`."""
        for lease in list(self._leases.values()):
            if claimed or not lease.claims:
                self.step(lease, Event.REVOKE, reason)

    def forget(self, key: OfferKey) -> None:
        """Remembers it no longer; the same name may have been offered again meanwhile."""
        if key in self._leases and self._leases[key].state in machine.TABLE.final:
            del self._leases[key]

    def _enter(self, lease: Lease, state: State) -> None:
        self._in_claim += (state is State.CLAIMED) - (lease.state is State.CLAIMED)
        lease.state = state

    def _count_standing(self, pool: int, change: int) -> None:
        self._active += change
        self._standing[pool] += change
        if not self._standing[pool]:
            del self._standing[pool]
        self._context.metrics.leases_active.set(self._active)
        self._check_idle()

    # --- pools, drain, status ---------------------------------------------------------------------------------------

    def has_pool(self, worker: str) -> bool:
        """Whether that worker may offer."""
        return worker in self._pools

    def pool_up(self, pool: Pool) -> None:
        """Offers of this pool are welcome."""
        self._pools[pool.worker] = pool

    def pool_down(self, pool: Pool) -> None:
        """The pool is gone; it was quiet."""
        self._pools.pop(pool.worker, None)
        self._quiescing.discard(pool.id)

    def quiesce(self, pool: Pool, *, force: bool) -> None:
        """Withdraws what nobody reads, waits for (or breaks) what somebody does."""
        self._quiescing.add(pool.id)
        for lease in [lease for lease in self._leases.values() if lease.pool.id == pool.id]:
            if force or not lease.claims:
                self.step(lease, Event.REVOKE, "withdrawn")
        self._check_quiet(pool)

    def _check_quiet(self, pool: Pool) -> None:
        if pool.id in self._quiescing and not self._standing[pool.id]:
            self._context.pools.tell(Quiesced(pool, self._owner))

    def drain(self) -> None:
        """Nothing new is offered; the house hears when the last has ended."""
        self.draining = True
        self._check_idle()

    def _check_idle(self) -> None:
        if self.draining and self._active == 0:
            self._context.idle(self._owner)

    def report(self) -> dict[str, int]:
        """As a status tells of them."""
        return {"active": self._active, "claimed": self._in_claim, "last_generation": self._last_generation}
