"""The scheduler: runs the pulls of this daemon's workers, the consumer's half of everything.

A pull has one transfer for each producer rank that it has to do with, and each follows `kvd.state.transfer`. The pull
is done when every transfer contributed; it fails with the first that fails, at its deadline, or when it is cancelled.
Its blocks are given back when no transfer of it can write any more, which may be later than its outcome.
"""

from msgspec import Struct

from kvd import limits
from kvd.actors.completion.messages import Notify
from kvd.actors.gateway.messages import Refusal, Reported
from kvd.actors.handshake.messages import ForgetPeer, NeedPeer
from kvd.actors.pools.messages import Quiesced
from kvd.actors.runtime.actor import Actor, handles
from kvd.actors.runtime.batch import Batch
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.deadlines import Deadlines
from kvd.actors.runtime.messages import Drain, Pool, PoolDown, PoolUp, Quiesce, Report, Stop
from kvd.actors.scheduler.messages import CancelRequest, PeerDown, PeerIdle, PeerReply, PeerUp, StartPull
from kvd.actors.scheduler.peer_requests import ClaimLasting, Overdue, RenewAll, SettleAll
from kvd.actors.scheduler.producers import Producers
from kvd.actors.scheduler.pulls import Pull, PullKey
from kvd.actors.scheduler.targets import Targets
from kvd.actors.scheduler.transfers import Prepare, Transfers
from kvd.errors import BadRequest, ErrorCode, KvdError, Unavailable
from kvd.protocol.worker import Cancelled, Done, Failed, Freed
from kvd.state.transfer import State
from kvd.transport.interface import Landed, ReadFailed, Transport

_PROVEN = frozenset({State.HELD, State.SETTLING})

_LOOKS = 3
"""How often a peer is asked for a pool that it has not named: more than once, as its answer may have been under way.
Where the ticket was made while its daemon was away, the worker may take its time to come back there: then once in each
`retry` seconds after that, until the pull's deadline."""


class _DeadlinesOver(Struct, frozen=True, gc=False):
    """The time of some pulls is over."""


class _LookAgain(Struct, frozen=True, gc=False):
    key: PullKey


class SchedulerActor(Actor):
    """See the module's text. A failure stops the daemon: its pulls fail at once, and none is ever wrongly done."""

    name = "scheduler"

    def __init__(self, context: ActorContext, transport: Transport) -> None:
        super().__init__(context.dispatcher)
        self._context = context
        self._targets = Targets()
        self._producers = Producers()
        self._pulls: dict[PullKey, Pull] = {}
        context.metrics.pulls_active.set_function(lambda: len(self._pulls))
        self._transfers = Transfers(
            context, transport, self._producers, self, tell=self.tell, tell_later=self.tell_later
        )
        self._quarantined = 0
        self._draining = False
        self._overdue: Batch[PullKey] = Batch(lambda: self.tell(_DeadlinesOver()))
        self._deadlines: Deadlines[PullKey] = Deadlines(context.loop, self._overdue.put)

    # --- a pull begins ----------------------------------------------------------------------------------------------

    @handles(StartPull)
    def start(self, message: StartPull) -> None:
        """Accepts a pull or refuses it, in which case nothing has changed."""
        pull, pool = message.pull, message.pool
        key = (pool.worker, pull.request)
        now, awaited = self.loop.time(), self._producers.unknown(message.ticket)
        record = Pull(
            key,
            pool,
            message.ticket,
            pull.spans,
            ticket_bytes=len(pull.ticket),
            started=now,
            awaited=awaited,
            unasked={rank.address for rank in message.ticket.ranks} - awaited,
            consumer=pull.consumer or pull.request,
        )
        try:
            self._check(key)
            self._targets.take(record)
        except KvdError as error:
            self._context.gateway.tell(Refusal(pool.worker, pull.call, error))
            return
        if self._context.spans is not None:
            record.span = self._context.spans.pull(pool.worker, pull)
        self._pulls[key] = record
        self._deadlines.set(key, now + pull.timeout)
        if record.awaited:
            self._need(record)
        else:
            self._route(record)

    def _check(self, key: PullKey) -> None:
        if self._draining:
            raise Unavailable(ErrorCode.SHUTTING_DOWN, "the daemon is stopping; pull elsewhere")
        if key in self._pulls:
            text = f"the pull {key[1]!r} has not ended, or its blocks are in quarantine; use a new id"
            raise BadRequest(ErrorCode.DUPLICATE_REQUEST, text)

    def _need(self, pull: Pull) -> None:
        pull.unasked -= pull.awaited
        for address in sorted(pull.awaited):
            self._context.handshake.tell(NeedPeer(address, stale=address in self._producers, worker=pull.key[0]))

    def _route(self, pull: Pull) -> None:
        """All producers are known: one transfer for each that this pull has to do with."""
        try:
            self._producers.check_names(pull.ticket)
        except KvdError as error:
            self._end(pull, error)
            return
        missing = self._producers.without_pool(pull.ticket)
        if missing and pull.looks < _LOOKS:
            self._look(pull, missing)
            return
        if missing and self._producers.may_come(pull.ticket, missing):
            self.tell_later(self._context.settings.retry, _LookAgain(pull.key))
            return
        pull.views = self._producers.views(pull.ticket)
        try:
            sources = self._producers.sources(pull)
        except KvdError as error:
            if pull.unasked:
                self._look(pull, set(pull.unasked))  # their engine may have another layout since they said
            else:
                self._end(pull, error)
            return
        for transfer in [self._transfers.open(pull, source) for source in sources]:
            if pull.outcome:
                return  # the blocks of the one before cannot be planned
            self._transfers.begin(transfer)
        if not pull.transfers:
            self.transfer_contributed(pull)

    def _look(self, pull: Pull, addresses: set[str]) -> None:
        pull.awaited = addresses
        pull.looks += 1
        self._need(pull)

    @handles(_LookAgain)
    def look_again(self, message: _LookAgain) -> None:
        """Asks once more for a pool whose worker had not come back to its daemon."""
        pull = self._pulls.get(message.key)
        if pull is None or pull.outcome or pull.transfers or pull.awaited:
            return
        addresses = self._producers.unknown(pull.ticket) or self._producers.without_pool(pull.ticket)
        if addresses:
            self._look(pull, addresses)
        else:
            self._route(pull)

    @handles(PeerUp)
    def peer_up(self, message: PeerUp) -> None:
        """Pulls that waited for this peer go on; grants of a pool that was not known yet can be used."""
        address = message.view.address
        self._producers.learn(message.view)
        for pull in [pull for pull in self._pulls.values() if address in pull.awaited]:
            pull.awaited.discard(address)
            if not pull.awaited:
                self._route(pull)
        self._transfers.learned(address)

    @handles(PeerDown)
    def peer_down(self, message: PeerDown) -> None:
        """What was asked of this peer is lost. Pulls that have asked nothing yet wait on where it will be back."""
        self._producers.forget(message.address)
        error = Unavailable(ErrorCode.PEER_LOST, f"the daemon at {message.address} is lost: {message.reason}")
        for pull in [pull for pull in self._pulls.values() if not pull.transfers and pull.asks(message.address)]:
            if message.restarted:
                pull.awaited.add(message.address)
            else:
                self._end(pull, error)
        self._transfers.lose(message.address, error)

    @handles(PeerIdle)
    def peer_idle(self, message: PeerIdle) -> None:
        """A pull may still be waiting for other peers before it asks this one."""
        address = message.address
        if not self._transfers.reads_from(address) and not any(pull.asks(address) for pull in self._pulls.values()):
            self._producers.forget(address)
            self._context.handshake.tell(ForgetPeer(address))

    # --- its transfers run ------------------------------------------------------------------------------------------

    @handles(PeerReply)
    def peer_reply(self, message: PeerReply) -> None:
        """A producer answers a claim or a fence."""
        self._transfers.answered(message)

    @handles(Landed)
    def landed(self, event: Landed) -> None:
        """Every byte of a read is in place."""
        self._transfers.landed(event)

    @handles(ReadFailed)
    def read_failed(self, event: ReadFailed) -> None:
        """A read is over without all its bytes."""
        self._transfers.read_failed(event)

    @handles(Prepare)
    def prepare(self, message: Prepare) -> None:
        """Plans while the claim is on its way."""
        self._transfers.prepare(message)

    @handles(Overdue)
    def overdue(self, _message: Overdue) -> None:
        """Answers are late."""
        self._transfers.overdue()

    @handles(ClaimLasting)
    def claim_lasting(self, _message: ClaimLasting) -> None:
        """Claims what began without, and lasts."""
        self._transfers.claim_lasting()

    @handles(RenewAll)
    def renew(self, _message: RenewAll) -> None:
        """Renews what is claimed."""
        self._transfers.renew()

    @handles(SettleAll)
    def settle(self, _message: SettleAll) -> None:
        """Tells producers of reads that were proven without them."""
        self._transfers.settle()

    # --- a pull ends ------------------------------------------------------------------------------------------------

    def transfer_contributed(self, pull: Pull) -> None:
        """One of its transfers has brought its bytes, and they are proven: the pull is done with the last of them."""
        if not pull.outcome and all(transfer.state in _PROVEN for transfer in pull.transfers):
            self._conclude(pull, "done")
            self._context.completion.tell(Notify(pull.key[0], Done(pull.key[1])))
            self.transfer_freed(pull)

    def transfer_failed(self, pull: Pull, error: KvdError) -> None:
        """One of its transfers cannot be done: nor can the pull."""
        self._end(pull, error)

    def _end(self, pull: Pull, error: KvdError, *, cancelled: bool = False) -> None:
        """The pull fails, or is cancelled; what runs for it is stopped, and its blocks are free when that has ended."""
        if pull.outcome:
            return
        self._conclude(pull, "cancelled" if cancelled else "failed", error)
        for transfer in pull.transfers:
            self._transfers.stop(transfer)
        worker, request = pull.key
        pull.quarantined = any(transfer.writing for transfer in pull.transfers)
        if cancelled:
            self._context.completion.tell(Notify(worker, Cancelled(request, pull.quarantined)))
        else:
            self._context.metrics.pull_failures.labels(error.code).inc()
            text = error.text[: limits.MAX_ERROR_TEXT]
            self._context.completion.tell(Notify(worker, Failed(request, error.code, text, pull.quarantined)))
        if pull.quarantined:
            self._count_quarantined(+1)
        self.transfer_freed(pull)

    def _conclude(self, pull: Pull, outcome: str, error: KvdError | None = None) -> None:
        pull.outcome = outcome
        if pull.span is not None:
            pull.span.end(outcome, error)
        self._deadlines.unset(pull.key)
        self.loop.call_soon(self._count, outcome, self.loop.time() - pull.started)  # nobody waits for it

    def _count(self, outcome: str, seconds: float) -> None:
        self._context.metrics.pulls.labels(outcome).inc()
        self._context.metrics.pull_seconds.observe(seconds)

    def transfer_freed(self, pull: Pull) -> None:
        """Gives the blocks of an ended pull back once none of its transfers can write to them."""
        if not pull.outcome or any(transfer.writing for transfer in pull.transfers) or pull.key not in self._pulls:
            return
        del self._pulls[pull.key]
        self._targets.give_back(pull)
        if pull.quarantined:
            self._count_quarantined(-1)
            self._context.completion.tell(Notify(pull.key[0], Freed(pull.key[1])))
        self._check_quiet(pull.pool)
        self._check_idle()

    def _count_quarantined(self, change: int) -> None:
        self._quarantined += change
        self._context.metrics.quarantined.set(self._quarantined)
        bound = self._context.settings.max_quarantined
        over = (
            f"{self._quarantined} pulls are in quarantine, the bound is {bound}: the transport does not end its reads"
        )
        self._context.condition("quarantine", over if self._quarantined > bound else None)

    @handles(_DeadlinesOver)
    def deadlines_over(self, _message: _DeadlinesOver) -> None:
        """The time of some pulls is over."""
        for key in self._overdue.take():
            pull = self._pulls.get(key)
            if pull is not None and key not in self._deadlines:
                waited_for = ", ".join(sorted({transfer.state for transfer in pull.transfers})) or "connecting"
                text = f"not done after {self.loop.time() - pull.started:.3f} s (it was {waited_for})"
                self._end(pull, Unavailable(ErrorCode.DEADLINE, text))

    @handles(CancelRequest)
    def cancel(self, message: CancelRequest) -> None:
        """The worker does not want a pull any more; anything else it names is an offer."""
        pull = self._pulls.get((message.worker, message.cancel.request))
        if pull is None:
            self._context.leases.tell(message)
        else:
            self._end(pull, Unavailable(ErrorCode.CANCELLED, "cancelled by the worker"), cancelled=True)

    # --- pools, drain, status ---------------------------------------------------------------------------------------

    @handles(PoolUp)
    def pool_up(self, message: PoolUp) -> None:
        """Pulls into this pool are welcome."""
        self._targets.up(message.pool)

    @handles(PoolDown)
    def pool_down(self, message: PoolDown) -> None:
        """The pool is gone; it was quiet."""
        self._targets.down(message.pool)
        self._producers.forget_pool(message.pool.epoch)

    @handles(Quiesce)
    def quiesce(self, message: Quiesce) -> None:
        """Cancels the pulls into a pool, and says when the last write has ended."""
        self._targets.close(message.pool.id)
        gone = Unavailable(ErrorCode.POOL_BUSY if message.force else ErrorCode.CANCELLED, message.why)
        for pull in [pull for pull in self._pulls.values() if pull.pool.id == message.pool.id]:
            self._end(pull, gone, cancelled=not message.force)
        self._check_quiet(message.pool)

    def _check_quiet(self, pool: Pool) -> None:
        if self._targets.is_quiet(pool.id):
            self._context.pools.tell(Quiesced(pool, self.name))

    @handles(Drain)
    def drain(self, _message: Drain) -> None:
        """Takes nothing new; says when the last pull has ended."""
        self._draining = True
        self._check_idle()

    def transfer_ended(self) -> None:
        """A drain waits for the last."""
        self._check_idle()

    def _check_idle(self) -> None:
        if self._draining and not self._pulls and not self._transfers:
            self._context.idle(self.name)

    @handles(Stop)
    def stop(self, _message: Stop) -> None:
        """Fails what has not ended."""
        for pull in list(self._pulls.values()):
            self._end(pull, Unavailable(ErrorCode.SHUTTING_DOWN, "the daemon stops"))

    @handles(Report)
    def report(self, message: Report) -> None:
        """Pulls by state, and what is in quarantine."""
        content = {
            "pulls": len(self._pulls),
            "connecting": sum(1 for pull in self._pulls.values() if pull.awaited and not pull.outcome),
            "transfers": self._transfers.states(),
            "quarantined": self._quarantined,
            "busy_blocks": self._targets.busy_blocks(),
            "routes": self._producers.routes,
        }
        self._context.gateway.tell(Reported(message.token, self.name, content))
