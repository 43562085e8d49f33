"""The scheduler: runs the pulls of this daemon's workers, the consumer's half of everything.

A pull follows the table of `pull`. It has one transfer for each producer rank that it reads from or reports to, and
each of those follows the table of `transfer`.
"""

from kvd import limits
from kvd.actors.completion.actor import CompletionActor, Sessions
from kvd.actors.handshake.actor import HandshakeActor
from kvd.actors.handshake.peers import PeerChannel
from kvd.actors.leases.actor import LeasesActor
from kvd.actors.pools.actor import PoolsActor
from kvd.actors.runtime.actor import Actor, Background, call
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.deferred import Batch, Deadlines
from kvd.actors.runtime.machine import EffectQueue
from kvd.actors.runtime.pools import Pool
from kvd.actors.scheduler import pull as machine
from kvd.actors.scheduler.leaving import LeavingPulls
from kvd.actors.scheduler.producers import Producers, check_names, may_come, unknown, without_pool
from kvd.actors.scheduler.pull import Effect, Event, Pull, PullKey, State
from kvd.actors.scheduler.targets import Targets
from kvd.actors.scheduler.transfers import Transfers
from kvd.actors.scheduler.unrouted import UnroutedPulls
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.protocol import worker as protocol
from kvd.protocol.status import PullStatus
from kvd.protocol.ticket import Ticket
from kvd.protocol.worker import Cancelled, Done, Failed, Freed
from kvd.transport.interface import Transport


class SchedulerActor(Actor):
    """See the module's text. A failure stops the daemon: its pulls fail at once, and none is ever wrongly done."""

    name = "scheduler"

    def __init__(
        self,
        context: ActorContext,
        transport: Transport,
        background: Background,
        *,
        sessions: Sessions,
        completion: CompletionActor,
        pools: PoolsActor,
        leases: LeasesActor,
        handshake: HandshakeActor,
        channel: PeerChannel,
    ) -> None:
        super().__init__(context.dispatcher)
        self._context = context
        self._sessions = sessions
        self._completion = completion
        self._pools = pools
        self._leases = leases
        self._handshake = handshake
        self._targets = Targets(context)
        self._producers = Producers(
            self,
            background,
            made=lambda numbers, failure: self.unrouted.routes_made(numbers, failure),  # noqa: PLW0108 - made below
            wanted=lambda: {pull.routing for pull in self._all()},
        )
        self._pulls: dict[PullKey, Pull] = {}
        self._effects = EffectQueue(when_empty=self._check_idle)
        self.transfers = Transfers(
            context,
            transport,
            self,
            self._producers,
            self._effects,
            handshake=handshake,
            channel=channel,
            background=background,
            step_pull=self._advance,
            grow=self._targets.grow,
        )
        self.unrouted = UnroutedPulls(
            context,
            self,
            self._producers,
            self.transfers,
            handshake=handshake,
            pulls=self._all,
            route=self._route,
            step=self._step,
        )
        self._leaving = LeavingPulls(context, self, give_up=lambda pull: self._step(pull, Event.FAIL))
        self._ending: Batch[tuple[Pull, Event, KvdError]] = Batch(self, self._end, lambda _: limits.BLOCKS_PER_PULL)
        """Those into a pool that quiesces."""
        self._draining = False
        self._deadlines: Deadlines[PullKey] = Deadlines(context.loop, Batch(self, self._deadlines_over).put)
        context.metrics.pulls_active.set_function(lambda: len(self._pulls))

    # --- a pull begins ----------------------------------------------------------------------------------------------

    def start(self, pool: Pool, request: protocol.Pull, ticket: Ticket) -> None:
        """Accepts a pull, with a decoded ticket and checked blocks; or refuses it, and then nothing has changed."""
        key = (pool.name, request.request)
        now, awaited = self.loop.time(), unknown(ticket, self._producers.ready)
        addresses = frozenset(rank.address for rank in ticket.ranks)
        pull = Pull(
            key,
            pool,
            ticket,
            request.spans,
            ticket_bytes=len(request.ticket) + limits.SPAN_BYTES * sum(map(len, ticket.blocks)),
            consumer=request.consumer or request.request,
            started=now,
            addresses=addresses,
            awaited=awaited,
            unasked=set(addresses - awaited),
            hold=request.hold,
            size=pool.blocks.size_of(request.spans),
        )
        try:
            self._check(key)
            self._targets.take(pull)
        except KvdError as error:
            self._sessions.refuse(pool.name, request.call, error)
            return
        if self._context.spans is not None:
            pull.span = self._context.spans.pull(pool.name, request)
        self._pulls[key] = pull
        self._deadlines.set(key, now + request.timeout)
        if pull.awaited:
            self._step(pull, Event.MISSING)
        else:
            self._route(pull)

    def _check(self, key: PullKey) -> None:
        if self._draining:
            raise refusal(ErrorCode.SHUTTING_DOWN, "the daemon is stopping; pull elsewhere")
        if key in self._pulls:
            text = f"the pull {key[1]!r} has not ended, or its blocks are in quarantine; use a new id"
            raise refusal(ErrorCode.DUPLICATE_REQUEST, text)

    def _route(self, pull: Pull) -> None:
        """Goes on with a pull whose producers' daemons are all ready."""
        try:
            event = self._find_transfers(pull)
        except KvdError as error:
            self._step(pull, Event.FAIL, error)
        else:
            if event is not None:
                self._step(pull, event)

    def _find_transfers(self, pull: Pull) -> Event | None:
        """Adds a transfer to the pull for each producer rank that it has to do with, or says what it waits for.

        None while its route is being worked out.
        """
        pull.routing = 0  # one between its producers as they were is not waited for any more
        ready = self._producers.ready
        check_names(pull.ticket, ready)
        missing = without_pool(pull.ticket, ready)
        if missing and pull.lookups_left > 0:
            return self._look_up(pull, missing)
        if missing and may_come(pull.ticket, missing):
            return Event.ABSENT
        pull.views = {address: ready[address] for address in pull.addresses}
        try:
            sources = self._producers.find(pull)
        except KvdError:
            if pull.unasked:  # a producer's engine may have changed its layout since its daemon was asked
                return self._look_up(pull, set(pull.unasked))
            raise
        if sources is None:
            return None
        for source in sources:
            self.transfers.add(pull, source)
        return Event.ROUTED

    def _look_up(self, pull: Pull, addresses: set[str]) -> Event:
        pull.awaited = addresses
        pull.lookups_left -= 1
        return Event.MISSING

    # --- its producers ----------------------------------------------------------------------------------------------

    def peer_down(self, address: str, reason: str, *, restarted: bool = False) -> None:
        """Fails what this peer was asked for.

        If it has restarted, it is being greeted already: pulls that are not routed yet wait for it.
        """
        error = refusal(ErrorCode.PEER_LOST, f"the daemon at {address} is lost: {reason}")
        self.unrouted.peer_down(address, error, restarted=restarted)
        self.transfers.lose(address, error)

    def peer_idle(self, address: str, announced: int) -> None:
        """No pull has needed this peer for long. It is forgotten, unless a transfer or a pull to be routed needs it.

        `announced` says how often it has been told to be up.
        """
        if not self.transfers.reads_from(address) and not self.unrouted.of(address):
            self._producers.forget(address)
            call(self._handshake.forget, address, announced)

    def _all(self) -> list[Pull]:
        return [*self._pulls.values(), *self._leaving]

    # --- steps and their effects ------------------------------------------------------------------------------------

    def _step(self, pull: Pull, event: Event, error: KvdError | None = None) -> None:
        self._advance(pull, event, error)
        self._effects.run()

    def _advance(self, pull: Pull, event: Event, error: KvdError | None = None) -> None:
        step = machine.TABLE.step(pull.state, event)
        pull.state = step.state
        for effect in step.effects:
            self._effects.put(self._carry_out, effect, pull, error)

    def _carry_out(self, effect: Effect, pull: Pull, error: KvdError | None) -> None:
        match effect:
            case Effect.CONNECT:
                self.unrouted.connect(pull)
            case Effect.RETRY:
                self.unrouted.retry_later(pull)
            case Effect.BEGIN:
                self.transfers.begin(pull)
            case Effect.CONCLUDE:
                self._conclude(pull, error)
            case Effect.STOP:
                self.transfers.stop(pull)
            case Effect.LEAVE:
                self._leaving.add(pull)
            case Effect.LEFT:
                self._leaving.discard(pull)
                self.transfers.leave(pull)
            case Effect.TELL_FREED:
                self._targets.end_quarantine(pull)
                self._completion.notify(pull.key[0], Freed(pull.key[1]))
            case Effect.FREE:
                del self._pulls[pull.key]
                self._targets.give_back(pull)
                self._check_quiet(pull.pool)

    def _conclude(self, pull: Pull, error: KvdError | None) -> None:
        worker, request = pull.key
        quarantined = pull.state in machine.QUARANTINED
        outcome: Done | Failed | Cancelled
        if error is None:
            outcome = Done(request)
        elif pull.state in machine.WAS_CANCELLED:
            outcome = Cancelled(request, quarantined)
        else:
            self._context.metrics.pull_failures.labels(error.code).inc()
            outcome = Failed(request, error.code, error.text, quarantined)
        if quarantined:
            self._targets.quarantine(pull)
        self._deadlines.unset(pull.key)
        self._completion.notify(worker, outcome)
        name = type(outcome).__name__.lower()
        if pull.span is not None:
            pull.span.end(name, error)
        self.call(self._count, name, self.loop.time() - pull.started)  # behind the worker's `done`

    def _count(self, outcome: str, seconds: float) -> None:
        self._context.metrics.pulls.labels(outcome).inc()
        self._context.metrics.pull_seconds.observe(seconds)

    # --- a pull ends early ------------------------------------------------------------------------------------------

    def _deadlines_over(self, keys: list[PullKey]) -> None:
        for key in keys:
            pull = self._pulls.get(key)
            if pull is not None and key not in self._deadlines:
                waited_for = ", ".join(sorted({transfer.state for transfer in pull.transfers})) or pull.state
                seconds = self.loop.time() - pull.started
                text = self._context.with_reason(f"not done after {seconds:.3f} s (it was {waited_for})", seconds)
                self._step(pull, Event.FAIL, refusal(ErrorCode.DEADLINE, text))

    def cancel(self, worker: str, cancel: protocol.Cancel) -> None:
        """The worker does not want a pull any more; anything else it names is an offer."""
        pull = self._pulls.get((worker, cancel.request))
        if pull is None:
            self._leases.withdraw(worker, cancel)
        else:
            self._step(pull, Event.CANCEL, refusal(ErrorCode.CANCELLED, "cancelled by the worker"))

    def worker_left(self, worker: str) -> None:
        """Its session has ended. Its pulls go on, but those that only hold offers: it asks again if it comes back."""
        error = refusal(ErrorCode.CANCELLED, "the worker's session has ended; hold the offer again if it is wanted")
        self._fail([pull for pull in self._holds() if pull.key[0] == worker], error)

    def _holds(self) -> list[Pull]:
        return [pull for pull in self._pulls.values() if pull.hold]

    def _fail(self, pulls: list[Pull], error: KvdError) -> None:
        for pull in pulls:
            self._step(pull, Event.FAIL, error)

    # --- pools, drain, status ---------------------------------------------------------------------------------------

    def pool_up(self, pool: Pool) -> None:
        """Pulls into this pool are accepted from now on."""
        self._targets.up(pool)

    def pool_down(self, pool: Pool, *, keys_end: bool) -> None:  # noqa: ARG002 - routes end with either
        """The pool is gone; it was quiet."""
        self._targets.down(pool)
        self._leaving.end(pool.id)
        self._producers.forget_pool(pool.epoch)
        call(self._handshake.worker_left, pool.name)

    def quiesce(self, pool: Pool, why: str, *, force: bool) -> None:
        """Ends the pulls into a pool, and tells when the last write has ended."""
        self._targets.close(pool.id)
        code, event = (ErrorCode.POOL_BUSY, Event.FAIL) if force else (ErrorCode.CANCELLED, Event.CANCEL)
        for pull in self._pulls.values():
            if pull.pool.id == pool.id:
                self._ending.put((pull, event, refusal(code, why)))
        self._check_quiet(pool)

    def _end(self, pulls: list[tuple[Pull, Event, KvdError]]) -> None:
        for pull, event, error in pulls:
            if self._pulls.get(pull.key) is pull:
                self._step(pull, event, error)

    def _check_quiet(self, pool: Pool) -> None:
        if self._targets.is_quiet(pool.id):
            call(self._pools.quiesced, pool, self.name)

    def drain(self) -> None:
        """Accepts nothing new; tells when the last pull and its last transfer have ended."""
        self._draining = True
        self._fail(self._holds(), refusal(ErrorCode.SHUTTING_DOWN, "the daemon is stopping; it holds no offers"))
        self._check_idle()

    def _check_idle(self) -> None:
        if self._draining and not self._pulls and not self.transfers:
            self._context.idle(self.name)

    def stop(self) -> None:
        """Fails the pulls that have not ended."""
        self._fail(list(self._pulls.values()), refusal(ErrorCode.SHUTTING_DOWN, "the daemon stops"))

    def report(self) -> PullStatus:
        """Transfers by state, and what is in quarantine: its part of a status."""
        return PullStatus(
            pulls=len(self._pulls),
            transfers=self.transfers.states(),
            quarantined=self._targets.quarantined,
            busy_blocks=self._targets.busy_blocks(),
            blocks=self._targets.held.report(),
            connecting=sum(pull.state is State.CONNECTING for pull in self._pulls.values()),
            routes=self._producers.routes,
        )
