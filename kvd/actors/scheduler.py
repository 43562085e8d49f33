"""The scheduler: runs the pulls of this daemon's workers, the consumer's half of everything.

A pull has one transfer for each producer rank that it has to do with, and each follows `kvd.state.transfer`. The pull
is done when every transfer contributed; it fails with the first that fails, at its deadline, or when it is cancelled.
Its blocks are given back when no transfer of it can write any more, which may be later than its outcome.
"""

from collections import Counter

from msgspec import Struct

from kvd import limits
from kvd.actors.actor import Actor, handles
from kvd.actors.asks import Asks, Overdue, RenewAll, SettleAll
from kvd.actors.blocks import BusyBlocks
from kvd.actors.expiry import Expiry
from kvd.actors.house import House
from kvd.actors.messages import (
    CancelRequest,
    Drain,
    ForgetPeer,
    NeedPeer,
    Notify,
    PeerAnswers,
    PeerDown,
    PeerIdle,
    PeerUp,
    PeerView,
    Pool,
    PoolDown,
    PoolUp,
    Quiesce,
    Quiet,
    Refusal,
    Report,
    Reported,
    StartPull,
    Stop,
)
from kvd.actors.pulls import Pull, PullKey, Transfer
from kvd.actors.routes import RouteKey, Source, make_route, plan_read, route_key
from kvd.errors import BadRequest, ErrorCode, KvdError, Unavailable, error_from_code
from kvd.protocol.peer import Broken, Grant, Held, Refuse, Settled
from kvd.protocol.ticket import digest, stamp
from kvd.protocol.worker import Cancelled, Done, Failed, Freed
from kvd.state import transfer as machine
from kvd.state.transfer import Effect, Event, State
from kvd.transport.interface import Landed, ReadFailed, Transport

_PROVEN = frozenset({State.HELD, State.SETTLING})

_LOOKS = 3
"""How often a peer is asked for a pool that it has not named: more than once, as its answer may have been under way."""


class _Deadline(Struct, frozen=True, gc=False):
    key: PullKey


class _Prepare(Struct, frozen=True, gc=False):
    number: int


class SchedulerActor(Actor):
    """See the module's text. A failure stops the daemon: its pulls fail at once, and none is ever wrongly done."""

    name = "scheduler"

    def __init__(self, house: House, transport: Transport) -> None:
        super().__init__(house.post)
        self._house = house
        self._transport = transport
        self._pools: dict[str, Pool] = {}
        self._busy: dict[int, BusyBlocks] = {}
        self._views: dict[str, PeerView] = {}
        self._direct: set[str] = set()
        """Peers whose memory the last read reached without their transport: those of the same host."""
        self._routes: dict[RouteKey, tuple[Source, ...]] = {}
        self._pulls: dict[PullKey, Pull] = {}
        self._open: Counter[int] = Counter()
        """Pulls by the id of the pool they write to."""
        self._transfers: dict[int, Transfer] = {}
        self._last_number = 0
        self._quarantined = 0
        self._quiescing: set[int] = set()
        self._draining = False
        self._deadlines: Expiry[PullKey] = Expiry(house.loop, lambda key: self.tell(_Deadline(key)))
        self._asks = Asks(house, self.tell, self.tell_later)

    # --- a pull begins ----------------------------------------------------------------------------------------------

    @handles(StartPull)
    def start(self, message: StartPull) -> None:
        """Accepts a pull or refuses it, in which case nothing has changed."""
        pull, pool = message.pull, message.pool
        key = (pool.worker, pull.request)
        try:
            self._check(key, pool)
            self._busy[pool.id].take(pull.spans)
        except KvdError as error:
            self._house.gateway.tell(Refusal(pool.worker, pull.call, error))
            return
        now = self.loop.time()
        awaited = {rank.address for rank in message.ticket.ranks}
        record = Pull(key, pool, message.ticket, pull.spans, started=now, awaited=awaited)
        if self._house.spans is not None:
            record.span = self._house.spans.pull(pool.worker, pull)
        self._pulls[key] = record
        self._open[pool.id] += 1
        self._house.metrics.pulls_active.inc()
        self._deadlines.set(key, now + pull.timeout)
        for rank in message.ticket.ranks:
            view = self._views.get(rank.address)
            if view is not None and rank.incarnation <= view.incarnation:
                record.awaited.discard(rank.address)
        if record.awaited:
            self._need(record)
        else:
            self._route(record)

    def _need(self, pull: Pull) -> None:
        for address in sorted(pull.awaited):
            self._house.handshake.tell(NeedPeer(address, stale=address in self._views))

    def _check(self, key: PullKey, pool: Pool) -> None:
        if self._draining:
            raise Unavailable(ErrorCode.SHUTTING_DOWN, "the daemon is stopping; pull elsewhere")
        if self._pools.get(pool.worker) is not pool or pool.id in self._quiescing:
            raise Unavailable(ErrorCode.WRONG_STATE, f"the pool {pool.worker!r} is being given back")
        if key in self._pulls:
            text = f"the pull {key[1]!r} has not ended, or its blocks are in quarantine; use a new id"
            raise BadRequest(ErrorCode.DUPLICATE_REQUEST, text)
        if self._open[pool.id] >= limits.MAX_REQUESTS_PER_WORKER:
            text = f"{self._open[pool.id]} pulls of this worker are open, the bound; wait until some have ended"
            raise Unavailable(ErrorCode.OVERLOADED, text)

    def _route(self, pull: Pull) -> None:
        """All producers are known: one transfer for each that this pull has to do with."""
        if pull.looks < _LOOKS:
            # A pool may be younger than what its daemon told us when we met.
            pull.awaited = {
                rank.address for rank in pull.ticket.ranks if rank.pool not in self._views[rank.address].pools
            }
            pull.looks += 1
        if pull.awaited:
            self._need(pull)
            return
        pull.views = {rank.address: self._views[rank.address] for rank in pull.ticket.ranks}
        try:
            sources = self._sources(pull)
        except KvdError as error:
            self._end(pull, error)
            return
        for source in sources:
            self._last_number += 1
            address = pull.ticket.ranks[source.rank].address
            transfer = Transfer(self._last_number, pull, source, address, address in self._direct)
            if pull.span is not None:
                transfer.span = pull.span.transfer(transfer.rank.daemon, transfer.rank.pool)
            pull.transfers.append(transfer)
            self._transfers[transfer.number] = transfer
        for transfer in pull.transfers:
            event = self._way_to(transfer)
            if pull.outcome:
                return  # its blocks cannot be planned
            self._step(transfer, event)
        if not pull.transfers:
            self._contributed(pull)

    def _way_to(self, transfer: Transfer) -> Event:
        """A grant is not waited for where the ticket names the lease and its memory is of this host."""
        rank = transfer.rank
        if not transfer.direct or not rank.generation or rank.epoch != transfer.source.pool.epoch:
            return Event.CONNECTED
        self._plan(transfer)
        transfer.generation = rank.generation
        return Event.KNOWN

    def _sources(self, pull: Pull) -> tuple[Source, ...]:
        key = route_key(pull.pool, pull.ticket.ranks, pull.views)
        if key not in self._routes:
            self._routes[key] = make_route(pull.pool, pull.ticket.ranks, pull.views)
        return self._routes[key]

    @handles(PeerUp)
    def peer_up(self, message: PeerUp) -> None:
        """Pulls that waited for this peer go on; grants of a pool that was not known yet can be used."""
        address = message.view.address
        self._views[address] = message.view
        for pull in [pull for pull in self._pulls.values() if address in pull.awaited]:
            pull.awaited.discard(address)
            if not pull.awaited:
                self._route(pull)
        for transfer in list(self._transfers.values()):
            if transfer.address == address and transfer.early_grant is not None:
                self._granted(transfer, transfer.early_grant)

    @handles(PeerDown)
    def peer_down(self, message: PeerDown) -> None:
        """What was asked of this peer is lost. Pulls that have asked nothing yet wait on where it will be back."""
        self._forget(message.address)
        error = Unavailable(ErrorCode.PEER_LOST, f"the daemon at {message.address} is lost: {message.reason}")
        for pull in [pull for pull in self._pulls.values() if not pull.transfers and pull.asks(message.address)]:
            if message.restarted:
                pull.awaited.add(message.address)
            else:
                self._end(pull, error)
        for transfer in list(self._transfers.values()):
            if transfer.address == message.address:
                self._step(transfer, Event.REFUSED, error)

    @handles(PeerIdle)
    def peer_idle(self, message: PeerIdle) -> None:
        """A pull may still be waiting for other peers before it asks this one."""
        asked = any(transfer.address == message.address for transfer in self._transfers.values())
        if not asked and not any(pull.asks(message.address) for pull in self._pulls.values()):
            self._forget(message.address)
            self._house.handshake.tell(ForgetPeer(message.address))

    def _forget(self, address: str) -> None:
        self._views.pop(address, None)
        self._direct.discard(address)
        self._routes = {
            key: sources for key, sources in self._routes.items() if all(address != source for source, *_ in key[1])
        }

    # --- what the producer says -------------------------------------------------------------------------------------

    @handles(PeerAnswers)
    def peer_answers(self, message: PeerAnswers) -> None:
        """An answer to a claim or a fence; answers to what has ended are dropped."""
        reply = message.reply
        if isinstance(reply, Settled):
            self._settled(message.address, reply.claims)
            return
        transfer = self._transfers.get(reply.claim)
        if transfer is None or transfer.address != message.address:
            return
        match reply:
            case Grant():
                self._granted(transfer, reply)
            case Held():
                if transfer.state in (State.FENCING, State.SETTLING):
                    self._step(transfer, Event.PROVEN)
            case Refuse() | Broken():
                self._step(transfer, Event.REFUSED, error_from_code(reply.code, reply.text))

    def _settled(self, address: str, claims: tuple[int, ...]) -> None:
        for number in claims:
            transfer = self._transfers.get(number)
            if transfer is not None and transfer.address == address and transfer.state is State.SETTLING:
                self._step(transfer, Event.PROVEN)

    def _granted(self, transfer: Transfer, grant: Grant) -> None:
        if transfer.state is State.READING and not transfer.granted:
            self._asks.answered(transfer)
            transfer.granted = True
        if transfer.state is not State.CLAIMING:
            return
        if grant.epoch != transfer.source.pool.epoch and not self._replan(transfer, grant):
            # The pool is another one than the peer told us about: ask, and use the grant when we know it.
            transfer.early_grant = grant
            self._house.handshake.tell(NeedPeer(transfer.address, stale=True))
            return
        transfer.early_grant = None
        transfer.granted = True
        transfer.generation = grant.generation
        self._plan(transfer)
        if not transfer.pull.outcome:
            self._step(transfer, Event.GRANTED)

    def _replan(self, transfer: Transfer, grant: Grant) -> bool:
        """Plans for the pool that the grant speaks of; False where the peer has not told us about it yet."""
        pull = transfer.pull
        rank = transfer.rank
        view = self._views.get(rank.address)
        if view is None or rank.pool not in view.pools or view.pools[rank.pool].epoch != grant.epoch:
            return False
        transfer.planned = False
        pull.views[rank.address] = view
        try:
            sources = {source.rank: source for source in self._sources(pull)}
        except KvdError as error:
            self._end(pull, error)
        else:
            transfer.source = sources.get(transfer.source.rank, transfer.source)
        return True

    @handles(_Prepare)
    def prepare(self, message: _Prepare) -> None:
        """Plans while the claim is on its way."""
        transfer = self._transfers.get(message.number)
        if transfer is not None and transfer.state is State.CLAIMING:
            self._plan(transfer)

    def _plan(self, transfer: Transfer) -> None:
        if transfer.planned or transfer.pull.outcome:
            return
        transfer.planned = True
        pull = transfer.pull
        try:
            groups = len(pull.pool.spec.groups)
            transfer.descriptors = plan_read(transfer.source, pull.ticket, pull.spans, groups)
            transfer.bytes = transfer.descriptors.bytes if transfer.descriptors else 0
        except KvdError as error:
            self._end(pull, error)

    @handles(Overdue)
    def overdue(self, message: Overdue) -> None:
        """The answer is late: it, or the ask, may have been lost with a connection. Or nothing was asked yet."""
        transfer = self._transfers.get(message.number)
        if transfer is None:
            return
        if transfer.ask is not None:
            self._asks.ask(transfer, transfer.ask)
        elif transfer.state is State.READING and not transfer.claimed:
            self._step(transfer, Event.LASTS)

    @handles(RenewAll)
    def renew(self, _message: RenewAll) -> None:
        """Renews what is claimed."""
        self._asks.renew(self._transfers.values())

    @handles(SettleAll)
    def settle(self, _message: SettleAll) -> None:
        """Tells producers of reads that were proven without them."""
        self._asks.settle()

    # --- what the transport says ------------------------------------------------------------------------------------

    @handles(Landed)
    def landed(self, event: Landed) -> None:
        """Every byte of a read is in place."""
        transfer = self._transfers[event.read]
        metrics = self._house.metrics
        metrics.read_seconds.observe(event.seconds)
        (self._direct.add if event.in_post else self._direct.discard)(transfer.address)
        if transfer.descriptors is not None:
            metrics.read_bytes.inc(transfer.bytes)
            metrics.read_descriptors.inc(transfer.descriptors.count)
        # A stamp proves only what was copied while the producer's process lived: memory that a network card reads
        # lives longer than the process that would have wiped the stamp.
        stamped = event.in_post and transfer.stamp and event.stamp == transfer.stamp
        self._step(transfer, Event.STAMPED if stamped else Event.LANDED)

    @handles(ReadFailed)
    def read_failed(self, event: ReadFailed) -> None:
        """A read is over without all its bytes."""
        self._house.metrics.reads_failed.inc()
        transfer = self._transfers[event.read]
        self._step(transfer, Event.BROKE, Unavailable(ErrorCode.TRANSPORT, event.reason))

    # --- the machine's effects --------------------------------------------------------------------------------------

    def _step(self, transfer: Transfer, event: Event, error: KvdError | None = None) -> None:
        step = machine.TABLE.step(transfer.state, event)
        if step.state is not transfer.state:
            self._asks.answered(transfer)
            if transfer.span is not None:
                transfer.span.enter(step.state)
        transfer.state = step.state
        for effect in step.effects:
            self._carry_out(effect, transfer, error)
        if transfer.state in machine.TABLE.final:
            self._transfers.pop(transfer.number, None)
            self._check_idle()

    def _carry_out(self, effect: Effect, transfer: Transfer, error: KvdError | None) -> None:
        match effect:
            case Effect.CLAIM:
                self._asks.claim(transfer)
                self.tell(_Prepare(transfer.number))
            case Effect.READ:
                self._read(transfer)
            case Effect.FENCE:
                transfer.writing = False
                self._asks.fence(transfer)
            case Effect.SETTLE:
                self._asks.settle_soon(transfer)
            case Effect.ABORT:
                self._transport.abort(transfer.number)
            case Effect.LET_GO:
                # A cancelled pull will not come again; one that failed may, from another rank or after a retry.
                self._asks.let_go(transfer, finished=transfer.pull.outcome == "cancelled")
            case Effect.FREE:
                transfer.writing = False
                self._check_free(transfer.pull)
            case Effect.FAIL:
                assert error is not None  # noqa: S101 - every event that fails a transfer says why
                self._end(transfer.pull, error)
            case Effect.CONTRIBUTE:
                self._contributed(transfer.pull)

    def _read(self, transfer: Transfer) -> None:
        if transfer.descriptors is None:
            self._step(transfer, Event.LANDED)
            return
        transfer.writing = True
        source, base = transfer.source, transfer.pull.pool.base
        word = self._word(transfer)
        if not transfer.claimed:
            self._asks.claim_if_it_lasts(transfer)
        self._transport.read(transfer.number, source.agent, base, source.pool.base, transfer.descriptors, stamp=word)

    def _word(self, transfer: Transfer) -> int:
        """Where the lease's stamp is to be read, 0 where a message must prove that it was held."""
        ticket, rank = transfer.pull.ticket, transfer.rank
        stamps = transfer.pull.views[rank.address].stamps
        if not transfer.direct or not stamps or not rank.stamp:
            return 0
        transfer.stamp = stamp(transfer.generation, digest(ticket.tokens, ticket.spans(rank)))
        return stamps + (rank.stamp - 1) * limits.STAMP_BYTES

    # --- a pull ends ------------------------------------------------------------------------------------------------

    def _contributed(self, pull: Pull) -> None:
        if not pull.outcome and all(transfer.state in _PROVEN for transfer in pull.transfers):
            self._conclude(pull, "done")
            self._house.completion.tell(Notify(pull.key[0], Done(pull.key[1])))
            self._check_free(pull)

    def _end(self, pull: Pull, error: KvdError, *, cancelled: bool = False) -> None:
        """The pull fails, or is cancelled; what runs for it is stopped, and its blocks are free when that has ended."""
        if pull.outcome:
            return
        self._conclude(pull, "cancelled" if cancelled else "failed", error)
        for transfer in pull.transfers:
            self._step(transfer, Event.STOP)
        worker, request = pull.key
        pull.quarantined = any(transfer.writing for transfer in pull.transfers)
        if cancelled:
            self._house.completion.tell(Notify(worker, Cancelled(request, pull.quarantined)))
        else:
            self._house.metrics.pull_failures.labels(error.code).inc()
            text = error.text[: limits.MAX_ERROR_TEXT]
            self._house.completion.tell(Notify(worker, Failed(request, error.code, text, pull.quarantined)))
        if pull.quarantined:
            self._count_quarantined(+1)
        self._check_free(pull)

    def _conclude(self, pull: Pull, outcome: str, error: KvdError | None = None) -> None:
        pull.outcome = outcome
        if pull.span is not None:
            pull.span.end(outcome, error)
        self._deadlines.unset(pull.key)
        self._house.metrics.pulls.labels(outcome).inc()
        self._house.metrics.pull_seconds.observe(self.loop.time() - pull.started)

    def _check_free(self, pull: Pull) -> None:
        """Gives the blocks of an ended pull back once nothing can write to them."""
        if not pull.outcome or any(transfer.writing for transfer in pull.transfers) or pull.key not in self._pulls:
            return
        del self._pulls[pull.key]
        self._open[pull.pool.id] -= 1
        if not self._open[pull.pool.id]:
            del self._open[pull.pool.id]
        self._house.metrics.pulls_active.dec()
        self._busy[pull.pool.id].give_back(pull.spans)
        if pull.quarantined:
            self._count_quarantined(-1)
            self._house.completion.tell(Notify(pull.key[0], Freed(pull.key[1])))
        self._check_quiet(pull.pool.id)
        self._check_idle()

    def _count_quarantined(self, change: int) -> None:
        self._quarantined += change
        self._house.metrics.quarantined.set(self._quarantined)
        bound = self._house.settings.max_quarantined
        over = (
            f"{self._quarantined} pulls are in quarantine, the bound is {bound}: the transport does not end its reads"
        )
        self._house.condition("quarantine", over if self._quarantined > bound else None)

    @handles(_Deadline)
    def deadline(self, message: _Deadline) -> None:
        """The time of a pull is over."""
        pull = self._pulls.get(message.key)
        if pull is not None:
            waited_for = ", ".join(sorted({transfer.state for transfer in pull.transfers})) or "connecting"
            text = f"not done after {self.loop.time() - pull.started:.3f} s (it was {waited_for})"
            self._end(pull, Unavailable(ErrorCode.DEADLINE, text))

    @handles(CancelRequest)
    def cancel(self, message: CancelRequest) -> None:
        """The worker does not want a pull any more; anything else it names is an offer."""
        pull = self._pulls.get((message.worker, message.cancel.request))
        if pull is None:
            self._house.leases.tell(message)
        else:
            self._end(pull, Unavailable(ErrorCode.CANCELLED, "cancelled by the worker"), cancelled=True)

    # --- pools, drain, status ---------------------------------------------------------------------------------------

    @handles(PoolUp)
    def pool_up(self, message: PoolUp) -> None:
        """Pulls into this pool are welcome."""
        self._pools[message.pool.worker] = message.pool
        self._busy[message.pool.id] = BusyBlocks(message.pool.spec)

    @handles(PoolDown)
    def pool_down(self, message: PoolDown) -> None:
        """The pool is gone; it was quiet."""
        pool = message.pool
        del self._pools[pool.worker], self._busy[pool.id]
        self._quiescing.discard(pool.id)
        self._routes = {key: sources for key, sources in self._routes.items() if key[0] != pool.epoch}

    @handles(Quiesce)
    def quiesce(self, message: Quiesce) -> None:
        """Cancels the pulls into a pool, and says when the last write has ended."""
        self._quiescing.add(message.pool)
        gone = Unavailable(ErrorCode.POOL_BUSY if message.force else ErrorCode.CANCELLED, message.why)
        for pull in [pull for pull in self._pulls.values() if pull.pool.id == message.pool]:
            self._end(pull, gone, cancelled=not message.force)
        self._check_quiet(message.pool)

    def _check_quiet(self, pool: int) -> None:
        if pool in self._quiescing and all(pull.pool.id != pool for pull in self._pulls.values()):
            self._house.pools.tell(Quiet(pool, self.name))

    @handles(Drain)
    def drain(self, _message: Drain) -> None:
        """Takes nothing new; says when the last pull has ended."""
        self._draining = True
        self._check_idle()

    def _check_idle(self) -> None:
        if self._draining and not self._pulls and not self._transfers:
            self._house.idle(self.name)

    @handles(Stop)
    def stop(self, _message: Stop) -> None:
        """Fails what has not ended."""
        for pull in list(self._pulls.values()):
            self._end(pull, Unavailable(ErrorCode.SHUTTING_DOWN, "the daemon stops"))

    @handles(Report)
    def report(self, message: Report) -> None:
        """Pulls by state, and what is in quarantine."""
        states = [transfer.state for transfer in self._transfers.values()]
        content = {
            "pulls": len(self._pulls),
            "connecting": sum(1 for pull in self._pulls.values() if pull.awaited and not pull.outcome),
            "transfers": {state: states.count(state) for state in State if state in states},
            "quarantined": self._quarantined,
            "busy_blocks": {pool.worker: self._busy[pool.id].count for pool in self._pools.values()},
            "routes": len(self._routes),
        }
        self._house.gateway.tell(Reported(message.token, self.name, content))
