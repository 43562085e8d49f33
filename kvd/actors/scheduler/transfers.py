"""The transfers of this daemon's pulls, one for each producer rank that a pull has to do with.

Each follows the table of `transfer`: answers of producers and reports of the transport become its events here, and its
effects are carried out.
"""

from collections.abc import Callable

from kvd.actors.handshake.actor import HandshakeActor
from kvd.actors.handshake.peers import PeerChannel
from kvd.actors.runtime.actor import Actor, Background, Component
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.machine import EffectQueue
from kvd.actors.scheduler import transfer as machine
from kvd.actors.scheduler.answers import Grants, Refusals
from kvd.actors.scheduler.leaving import Leaving
from kvd.actors.scheduler.peer_requests import ClaimShares, PeerRequests
from kvd.actors.scheduler.plans import Plans
from kvd.actors.scheduler.producers import Producers
from kvd.actors.scheduler.pull import WAS_CANCELLED, Pull
from kvd.actors.scheduler.pull import Event as PullEvent
from kvd.actors.scheduler.routes import Source, Told
from kvd.actors.scheduler.transfer import Effect, Event, State, Transfer
from kvd.errors import ErrorCode, KvdError, error_from_code, refusal
from kvd.plan import Descriptors
from kvd.protocol.peer import Broken, Grant, Grown, Held, LeaseAnswer, Refuse, Settled
from kvd.transport.interface import Landed, ReadFailed, ReadRequest, Transport


class Transfers(Component):
    """See the module's text. `step_pull` takes events of pulls; it runs no effects.

    `grow` counts bytes as a part of a pull's ticket, and raises if they are too many.
    """

    def __init__(
        self,
        context: ActorContext,
        transport: Transport,
        scheduler: Actor,
        producers: Producers,
        effects: EffectQueue,
        *,
        handshake: HandshakeActor,
        channel: PeerChannel,
        background: Background,
        step_pull: Callable[[Pull, PullEvent, KvdError | None], None],
        grow: Callable[[Pull, int], None],
    ) -> None:
        self.actor = scheduler
        self._context = context
        self._transport = transport
        self._effects = effects
        self._step_pull = step_pull
        self._open: dict[int, Transfer] = {}
        self._last_number = 0
        self._shares = ClaimShares()
        self._leaving: Leaving[Transfer] = Leaving(self._give_up)
        self._plans = Plans(scheduler, background, self._planned)
        self._requests = PeerRequests(context, scheduler, channel, transfers=self._open, step=self._step)
        self._refusals = Refusals(context, scheduler, self._requests, transfers=self._open, step=self._step)
        self._grants = Grants(
            producers, self._plans, self._requests, handshake=handshake, step=self._step, fail=self._fail, grow=grow
        )

    def __len__(self) -> int:
        return len(self._open)

    def reads_from(self, address: str) -> bool:
        """Whether a transfer of this peer is open."""
        return any(transfer.address == address for transfer in self._open.values())

    def states(self) -> dict[str, int]:
        """How many are in each state."""
        states = [transfer.state for transfer in self._open.values()]
        return {state: states.count(state) for state in State if state in states}

    # --- begin and end ----------------------------------------------------------------------------------------------

    def add(self, pull: Pull, source: Source) -> None:
        """Adds one transfer to a pull; `begin` is called when the pull has all of them."""
        self._last_number += 1
        ticket, rank = pull.ticket, pull.ticket.ranks[source.rank]
        told = Told(ticket.tokens, ticket.spans(rank), whole=not ticket.grows, stamp=rank.stamp)
        transfer = Transfer(self._last_number, pull, source, rank, told)
        if pull.span is not None:
            transfer.span = pull.span.transfer(transfer.rank.daemon, transfer.rank.pool)
        pull.transfers.append(transfer)
        self._open[transfer.number] = transfer

    def begin(self, pull: Pull) -> None:
        """Reads at once where stamps show that the tickets are right; asks for grants elsewhere."""
        for transfer in pull.transfers:
            transfer.asks = not self._is_known(transfer)
        try:
            for transfer in pull.transfers:
                if transfer.asks:
                    self._shares.check(transfer)
                else:
                    self._plans.plan_now(transfer)
        except KvdError as error:
            self._fail(transfer, error)
            return  # none of its transfers may begin
        for transfer in pull.transfers:
            if transfer.asks:
                self._step(transfer, Event.BEGIN)
            else:
                transfer.generation = transfer.rank.generation
                self._step(transfer, Event.KNOWN)
        self._check_proven(pull)

    def _is_known(self, transfer: Transfer) -> bool:
        """Whether its read may begin without a claim. One whose plan takes or waits for long is claimed meanwhile."""
        may = transfer.is_stamped and transfer.view.same_host and not transfer.pull.hold
        return may and self._plans.is_at_once(transfer)

    def leave(self, pull: Pull) -> None:
        """Tells the producers of a pull that was cancelled before it could begin that its reader will not come."""
        for transfer in pull.transfers:
            self._step(transfer, Event.LEFT)

    def stop(self, pull: Pull) -> None:
        """Ends the transfers of a pull that has ended."""
        for transfer in pull.transfers:
            early = transfer.state in (State.CLAIMING, State.FENCING) and self._left_early(transfer)
            self._step(transfer, Event.LEFT if early else Event.STOP)

    def _give_up(self, transfer: Transfer) -> None:
        """Too many are leaving: the producer is told once, which is enough unless that is lost."""
        self._requests.release(transfer)
        self._step(transfer, Event.REFUSED)

    @staticmethod
    def _left_early(transfer: Transfer) -> bool:
        """Whether its reader will not come, and the producer perhaps knows no claim that could be released."""
        return transfer.pull.state in WAS_CANCELLED and not transfer.granted and not transfer.released

    def lose(self, address: str, error: KvdError) -> None:
        """What was asked of this peer is lost."""
        self._refusals.lose(address, error)

    # --- what the producer says -------------------------------------------------------------------------------------

    def answered(self, address: str, reply: LeaseAnswer) -> None:
        """Takes a producer's answer; those to transfers that have ended are dropped."""
        if isinstance(reply, Broken):
            self._refusals.broken(address, reply)
            return
        for number in reply.claims if isinstance(reply, Settled) else (reply.claim,):
            transfer = self._open.get(number)
            if transfer is not None and transfer.address == address:
                self._answered(transfer, reply)

    def _answered(self, transfer: Transfer, reply: Grant | Grown | Refuse | Held | Settled) -> None:
        match reply:
            case Grant():
                self._grants.granted(transfer, reply)
            case Grown():
                self._grants.grown(transfer, reply)
            case Held():
                if transfer.state is State.FENCING or transfer.state in machine.TELLING:
                    self._step(transfer, Event.PROVEN)
            case Settled():
                if transfer.state in machine.TELLING:
                    self._step(transfer, Event.PROVEN)
            case Refuse():
                self._refusals.refused(transfer, error_from_code(reply.code, reply.text))

    def _planned(self, transfer: Transfer, result: Descriptors | KvdError) -> None:
        if isinstance(result, KvdError):
            self._fail(transfer, result)
        else:
            self._read_planned(transfer)

    def _read_planned(self, transfer: Transfer) -> None:
        """Reads what is planned, if that was waited for: a part of it may have been made ahead."""
        if transfer.state is State.PLANNING and transfer.descriptors is not None:
            self._step(transfer, Event.PLANNED)

    def granted_early(self, address: str) -> list[Pull]:
        """The pulls with grants of this peer's pools that were not known when they came."""
        early = (transfer for transfer in self._open.values() if transfer.early_grant is not None)
        return [transfer.pull for transfer in early if transfer.address == address]

    def rerouted(self, pull: Pull) -> None:
        """Uses the grants of this pull that waited for word from a peer, or for a route."""
        for transfer in pull.transfers:
            if transfer.early_grant is not None:
                self._grants.granted(transfer, transfer.early_grant)

    # --- what the transport says ------------------------------------------------------------------------------------

    def landed(self, event: Landed) -> None:
        """Every byte of a read is in place."""
        transfer = self._open[event.read]
        read = transfer.plan()
        moved, descriptors = read.bytes, read.count  # its plan is dropped when the read has ended
        stamped = transfer.stamp and event.stamp == transfer.stamp
        self._read_ended(transfer, Event.STAMPED if stamped else self._has_landed(transfer))
        self._read_planned(transfer)
        self.actor.call(self._count, event.seconds, moved, descriptors)

    def _has_landed(self, transfer: Transfer) -> Event:
        """What it means that the first part of its plan is here; of a read that drains no other is wanted."""
        if len(transfer.parts) > 1 and transfer.state is State.READING:
            self._plans.landed(transfer)
            return Event.NEXT
        return transfer.has_landed()

    def _count(self, seconds: float, size: int, descriptors: int) -> None:
        metrics = self._context.metrics
        metrics.read_seconds.observe(seconds)
        metrics.read_bytes.inc(size)
        metrics.read_descriptors.inc(descriptors)

    def read_failed(self, event: ReadFailed) -> None:
        """A read has ended without all its bytes, or has not begun."""
        transfer = self._open[event.read]
        if event.unproven:
            transfer.granted = False  # what is granted now is read without looking
            self._read_ended(transfer, Event.UNPROVEN)
            return
        self._context.metrics.reads_failed.inc()
        # The reads of a lost producer fail with it, and may do so before their turn has come.
        self._read_ended(transfer, Event.BROKE, transfer.failing or refusal(ErrorCode.TRANSPORT, event.reason))

    def _read_ended(self, transfer: Transfer, event: Event, error: KvdError | None = None) -> None:
        early = transfer.state is State.DRAINING and self._left_early(transfer)
        self._step(transfer, Event.LEFT if early else event, error)

    # --- steps and their effects ------------------------------------------------------------------------------------

    def _step(self, transfer: Transfer, event: Event, error: KvdError | None = None) -> None:
        before, step = transfer.state, machine.TABLE.step(transfer.state, event)
        transfer.state = step.state
        if step.state is not before:
            if transfer.asks:
                self._shares.step(transfer, before)
            if (event, step.state) != (Event.STOP, State.DRAINING):  # it may hold its claim until it is released
                self._requests.answered(transfer)
            if transfer.planning is not None and step.state not in (State.PLANNING, State.READING):
                self._plans.drop(transfer)
            if step.state in machine.READ:
                self._plans.ended(transfer)
            if transfer.span is not None:
                enter = transfer.span.end if step.state in machine.TABLE.final else transfer.span.enter
                enter(step.state)
        for effect in step.effects:
            self._effects.put(self._carry_out, effect, transfer, error)
        if before is State.LEAVING:
            self._leaving.discard(transfer, transfer.pull.pool.id)
        if step.state in machine.TABLE.final:
            self._open.pop(transfer.number, None)
        self._tell_reads(transfer.pull, before, step.state)
        self._effects.run()

    def _tell_reads(self, pull: Pull, before: State, after: State) -> None:
        """Tells the pull that a read of it has been opened, or that the last has been closed."""
        if before not in machine.OPEN and after in machine.OPEN:
            self._step_pull(pull, PullEvent.OPENED, None)
        elif before in machine.OPEN and not any(transfer.state in machine.OPEN for transfer in pull.transfers):
            self._step_pull(pull, PullEvent.CLOSED, None)

    def _carry_out(self, effect: Effect, transfer: Transfer, error: KvdError | None) -> None:
        match effect:
            case Effect.CLAIM:
                self._requests.claim(transfer)
                self._effects.put(self._plan_claimed, transfer)  # while all claims of the pull are on their way
            case Effect.FOLLOW:
                self._requests.follow(transfer)
            case Effect.READ:
                self._read(transfer)
            case Effect.FENCE:
                self._requests.fence(transfer)
            case Effect.SETTLE:
                self._settle(transfer)
            case Effect.ABORT:
                self._transport.abort(transfer.number)
            case Effect.RELEASE:
                self._requests.release(transfer)
            case Effect.FAIL:
                self._step_pull(transfer.pull, PullEvent.FAIL, error)
            case Effect.CONTRIBUTE:
                self._check_proven(transfer.pull)

    def _settle(self, transfer: Transfer) -> None:
        self._requests.settle_soon(transfer)
        if transfer.state is State.LEAVING:
            pull = transfer.pull
            self._leaving.add(transfer, pull.pool.id, pull.ticket_bytes // len(pull.transfers))

    def _check_proven(self, pull: Pull) -> None:
        if all(transfer.state in machine.PROVEN for transfer in pull.transfers):
            self._step_pull(pull, PullEvent.PROVEN, None)

    def _plan_claimed(self, transfer: Transfer) -> None:
        if transfer.state is State.CLAIMING and transfer.told.whole:
            try:
                self._plans.plan(transfer)
            except KvdError as error:
                self._fail(transfer, error)

    def _fail(self, transfer: Transfer, error: KvdError) -> None:
        """Fails the pull, which stops all its transfers."""
        self._step_pull(transfer.pull, PullEvent.FAIL, error)
        self._effects.run()

    def _read(self, transfer: Transfer) -> None:
        read, source = transfer.plan(), transfer.source
        if not read.count:
            self._step(transfer, self._has_landed(transfer))
            self._read_planned(transfer)
            return
        word = transfer.expect_stamp()
        if not transfer.claimed:
            self._requests.claim_if_it_lasts(transfer)
        expected = 0 if transfer.granted else transfer.stamp  # a grant shows that the ticket is right
        here, there = transfer.pull.pool.base, source.pool.base
        more = not transfer.told.whole
        self._transport.read(ReadRequest(transfer.number, source.agent, here, there, read, word, expected, part=more))
