"""The transfers of this daemon's pulls, one for each producer rank that a pull has to do with.

Each follows `kvd.state.transfer`. What the producer answers and what the transport reports become its events here, and
its effects are carried out.
"""

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from kvd.actors.handshake.messages import NeedPeer
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.messages import LeaseAnswer
from kvd.actors.scheduler.messages import PeerReply
from kvd.actors.scheduler.peer_requests import PeerRequests
from kvd.actors.scheduler.producers import Producers
from kvd.actors.scheduler.pulls import Pull, Transfer
from kvd.actors.scheduler.routes import Source
from kvd.errors import ErrorCode, KvdError, Unavailable, error_from_code
from kvd.protocol.peer import Broken, Grant, Held, Refuse, Settled
from kvd.state import transfer as machine
from kvd.state.transfer import Effect, Event, State
from kvd.transport.interface import Landed, ReadFailed, ReadRequest, Transport


class Prepare(Struct, frozen=True, gc=False):
    """To the scheduler: plan this transfer, while its claim is on its way."""

    number: int


class Outcomes(Protocol):
    """Who hears what becomes of transfers: the scheduler."""

    def transfer_failed(self, pull: Pull, error: KvdError) -> None:
        """A pull cannot be done any more."""

    def transfer_contributed(self, pull: Pull) -> None:
        """One of a pull's transfers has brought its bytes, and they are proven."""

    def transfer_freed(self, pull: Pull) -> None:
        """One of a pull's transfers does not write any more."""

    def transfer_ended(self) -> None:
        """One is over."""


class Transfers:
    """See the module's text. `tell` and `tell_later` reach the scheduler, which passes on what it is told."""

    def __init__(
        self,
        context: ActorContext,
        transport: Transport,
        producers: Producers,
        outcomes: Outcomes,
        *,
        tell: Callable[[object], None],
        tell_later: Callable[[float, object], object],
    ) -> None:
        self._context = context
        self._transport = transport
        self._producers = producers
        self._outcomes = outcomes
        self._tell = tell
        self._open: dict[int, Transfer] = {}
        self._last_number = 0
        self._requests = PeerRequests(context, tell, tell_later)

    def __len__(self) -> int:
        return len(self._open)

    def reads_from(self, address: str) -> bool:
        """Whether a transfer of this peer is open."""
        return any(transfer.address == address for transfer in self._open.values())

    def states(self) -> dict[State, int]:
        """How many are in each state."""
        states = [transfer.state for transfer in self._open.values()]
        return {state: states.count(state) for state in State if state in states}

    # --- begin and end ----------------------------------------------------------------------------------------------

    def open(self, pull: Pull, source: Source) -> Transfer:
        """One of a pull's transfers, to be begun when it has them all."""
        self._last_number += 1
        address = pull.ticket.ranks[source.rank].address
        transfer = Transfer(self._last_number, pull, source, address, self._producers.is_direct(address))
        if pull.span is not None:
            transfer.span = pull.span.transfer(transfer.rank.daemon, transfer.rank.pool)
        pull.transfers.append(transfer)
        self._open[transfer.number] = transfer
        return transfer

    def begin(self, transfer: Transfer) -> None:
        """Asks for a grant, or reads at once where none has to be waited for."""
        if not transfer.claims_late:
            self._step(transfer, Event.CONNECTED)
            return
        self._plan(transfer)
        transfer.generation = transfer.rank.generation
        if not transfer.pull.outcome:
            self._step(transfer, Event.KNOWN)

    def stop(self, transfer: Transfer) -> None:
        """Its pull has ended."""
        self._step(transfer, Event.STOP)

    def lose(self, address: str, error: KvdError) -> None:
        """What was asked of this peer is lost."""
        for transfer in list(self._open.values()):
            if transfer.address == address:
                self._requests.answered(transfer)
                self._step(transfer, Event.REFUSED, error)

    # --- what the producer says -------------------------------------------------------------------------------------

    def answered(self, message: PeerReply) -> None:
        """An answer to a claim or a fence; answers to what has ended are dropped."""
        reply = message.reply
        for number in reply.claims if isinstance(reply, Settled | Broken) else (reply.claim,):
            transfer = self._open.get(number)
            if transfer is not None and transfer.address == message.address:
                self._answered(transfer, reply)

    def _answered(self, transfer: Transfer, reply: LeaseAnswer) -> None:
        match reply:
            case Grant():
                self._granted(transfer, reply)
            case Held():
                if transfer.state in (State.FENCING, State.SETTLING):
                    self._step(transfer, Event.PROVEN)
            case Settled():
                if transfer.state is State.SETTLING:
                    self._step(transfer, Event.PROVEN)
            case Refuse() | Broken():
                self._requests.answered(transfer)
                self._step(transfer, Event.REFUSED, error_from_code(reply.code, reply.text))

    def _granted(self, transfer: Transfer, grant: Grant) -> None:
        rank = transfer.rank
        if transfer.granted or transfer.state not in (State.CLAIMING, State.READING, State.DRAINING):
            return
        if rank.generation not in (0, grant.generation) or rank.incarnation not in (0, grant.incarnation):
            text = f"the ticket names lease {rank.generation} of run {rank.incarnation} of {rank.daemon!r}"
            text += f", which grants {grant.generation} of {grant.incarnation}"
            error = Unavailable(ErrorCode.OFFER_GONE, text)
            self._outcomes.transfer_failed(transfer.pull, error)
            return
        known = (grant.incarnation, grant.epoch) == (transfer.incarnation, transfer.source.pool.epoch)
        if transfer.state is not State.CLAIMING:
            if known:
                self._requests.answered(transfer)
                transfer.granted = True
            return
        if not known and not self._replan(transfer, grant):
            # The pool is another one than the peer told us about: ask, and use the grant when we know it.
            transfer.early_grant = grant
            self._context.handshake.tell(NeedPeer(transfer.address, stale=True))
            return
        transfer.early_grant = None
        transfer.granted = True
        transfer.generation = grant.generation
        self._plan(transfer)
        if not transfer.pull.outcome:
            self._step(transfer, Event.GRANTED)

    def learned(self, address: str) -> None:
        """A peer has told us about its pools: grants of one that was not known yet can be used."""
        for transfer in list(self._open.values()):
            if transfer.address == address and transfer.early_grant is not None:
                self._granted(transfer, transfer.early_grant)

    def _replan(self, transfer: Transfer, grant: Grant) -> bool:
        """Routes anew, to the pool that the grant speaks of; False where the peer has not told us about it yet."""
        pull, rank = transfer.pull, transfer.rank
        if rank.address not in self._producers:
            return False
        view = self._producers[rank.address]
        if rank.pool not in view.pools or view.pools[rank.pool].epoch != grant.epoch:
            return False
        if view.incarnation != grant.incarnation:
            return False
        transfer.planned = False
        pull.views[rank.address] = view
        try:
            sources = {source.rank: source for source in self._producers.sources(pull)}
        except KvdError as error:
            self._outcomes.transfer_failed(pull, error)
        else:
            transfer.source = sources.get(transfer.source.rank, transfer.source)
        return True

    def _plan(self, transfer: Transfer) -> None:
        if not transfer.pull.outcome:
            try:
                transfer.plan()
            except KvdError as error:
                self._outcomes.transfer_failed(transfer.pull, error)

    # --- what it is time for ----------------------------------------------------------------------------------------

    def prepare(self, message: Prepare) -> None:
        """Plans while the claim is on its way."""
        transfer = self._open.get(message.number)
        if transfer is not None and transfer.state is State.CLAIMING:
            self._plan(transfer)

    def overdue(self) -> None:
        """Answers are late: they, or the asks, may have been lost with a connection."""
        for number in self._requests.take_late():
            transfer = self._open.get(number)
            if transfer is None or transfer.ask is None:
                continue
            if transfer.state is State.SETTLING and self._context.loop.time() > transfer.settled_by:
                self._step(transfer, Event.REFUSED)  # a peer that lives and does not answer: its lease ends by its time
            else:
                self._requests.ask(transfer, transfer.ask)

    def claim_lasting(self) -> None:
        """Claims what is read without a claim and has not ended."""
        for transfer in self._requests.take_lasting():
            self._step(transfer, Event.LASTS)

    def renew(self) -> None:
        """Renews what is claimed."""
        self._requests.renew(self._open.values())

    def settle(self) -> None:
        """Tells producers of reads that were proven without them."""
        self._requests.settle()

    # --- what the transport says ------------------------------------------------------------------------------------

    def landed(self, event: Landed) -> None:
        """Every byte of a read is in place."""
        transfer = self._open[event.read]
        self._producers.was_read(transfer.address, direct=event.in_post)
        assert transfer.descriptors is not None  # noqa: S101 - a transfer without any reads nothing
        self._context.loop.call_soon(self._count, event.seconds, transfer.bytes, transfer.descriptors.count)
        # A stamp proves only what was copied while the producer's process lived: memory that a network card reads
        # lives longer than the process that would have wiped the stamp.
        stamped = event.in_post and transfer.stamp and event.stamp == transfer.stamp
        self._step(transfer, Event.STAMPED if stamped else Event.LANDED)

    def _count(self, seconds: float, size: int, descriptors: int) -> None:
        metrics = self._context.metrics
        metrics.read_seconds.observe(seconds)
        metrics.read_bytes.inc(size)
        metrics.read_descriptors.inc(descriptors)

    def read_failed(self, event: ReadFailed) -> None:
        """A read is over without all its bytes."""
        self._context.metrics.reads_failed.inc()
        self._step(self._open[event.read], Event.BROKE, Unavailable(ErrorCode.TRANSPORT, event.reason))

    # --- the machine's effects --------------------------------------------------------------------------------------

    def _step(self, transfer: Transfer, event: Event, error: KvdError | None = None) -> None:
        step = machine.TABLE.step(transfer.state, event)
        if step.state is not transfer.state:
            if (event, step.state) != (Event.STOP, State.DRAINING):  # what is read on is to be held on
                self._requests.answered(transfer)
            if transfer.span is not None:
                transfer.span.enter(step.state)
        transfer.state = step.state
        for effect in step.effects:
            self._carry_out(effect, transfer, error)
        if transfer.state in machine.TABLE.final:
            self._open.pop(transfer.number, None)
            self._outcomes.transfer_ended()

    def _carry_out(self, effect: Effect, transfer: Transfer, error: KvdError | None) -> None:
        match effect:
            case Effect.CLAIM:
                self._requests.claim(transfer)
                self._tell(Prepare(transfer.number))
            case Effect.READ:
                self._read(transfer)
            case Effect.FENCE:
                transfer.writing = False
                self._requests.fence(transfer)
            case Effect.SETTLE:
                self._requests.settle_soon(transfer)
            case Effect.ABORT:
                self._transport.abort(transfer.number)
            case Effect.LET_GO:
                # A cancelled pull will not come again; one that failed may, from another rank or after a retry.
                self._requests.let_go(transfer, finished=transfer.pull.outcome == "cancelled")
            case Effect.FREE:
                transfer.writing = False
                self._outcomes.transfer_freed(transfer.pull)
            case Effect.FAIL:
                assert error is not None  # noqa: S101 - every event that fails a transfer says why
                self._outcomes.transfer_failed(transfer.pull, error)
            case Effect.CONTRIBUTE:
                self._outcomes.transfer_contributed(transfer.pull)

    def _read(self, transfer: Transfer) -> None:
        if transfer.descriptors is None:
            self._step(transfer, Event.LANDED)
            return
        transfer.writing = True
        source, base = transfer.source, transfer.pull.pool.base
        word = transfer.expect_stamp()
        if not transfer.claimed:
            self._requests.claim_if_it_lasts(transfer)
        request = ReadRequest(transfer.number, source.agent, base, source.pool.base, transfer.descriptors, word)
        self._transport.read(request)
