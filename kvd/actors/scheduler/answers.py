"""What producers answer: grants and offers that grow; refusals, broken leases, and daemons that are lost."""

from collections.abc import Callable, Mapping
from typing import Final

import structlog

from kvd import limits
from kvd.actors.handshake.actor import HandshakeActor
from kvd.actors.runtime.actor import Actor, call
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.deferred import Batch
from kvd.actors.runtime.pace import WarnOnce
from kvd.actors.scheduler.peer_requests import PeerRequests
from kvd.actors.scheduler.plans import Plans
from kvd.actors.scheduler.producers import Producers
from kvd.actors.scheduler.pull import Pull
from kvd.actors.scheduler.transfer import OPEN, TELLING, Event, State, Transfer
from kvd.errors import ErrorCode, KvdError, error_from_code, refusal
from kvd.protocol.peer import Broken, Grant, Grown


class Grants:
    """Makes them events of transfers, by `step`; a transfer that cannot use one has its pull fail, by `fail`.

    `grow` counts bytes as a part of a pull's ticket, and raises if they are too many.
    """

    def __init__(
        self,
        producers: Producers,
        plans: Plans,
        requests: PeerRequests,
        *,
        handshake: HandshakeActor,
        step: Callable[[Transfer, Event], None],
        fail: Callable[[Transfer, KvdError], None],
        grow: Callable[[Pull, int], None],
    ) -> None:
        self._producers = producers
        self._plans = plans
        self._requests = requests
        self._handshake = handshake
        self._step = step
        self._fail = fail
        self._grow = grow

    def granted(self, transfer: Transfer, grant: Grant) -> None:
        """A producer holds the lease of a transfer, or has been asked again and says so once more."""
        if transfer.granted or transfer.state not in (State.CLAIMING, State.READING, State.DRAINING):
            return
        if transfer.pull.failing is not None:
            return  # it would begin to read
        rank = transfer.rank
        if rank.generation not in (0, grant.generation) or rank.incarnation not in (0, grant.incarnation):
            text = f"the ticket names lease {rank.generation} of run {rank.incarnation} of {rank.daemon!r}"
            text += f", which grants {grant.generation} of {grant.incarnation}"
            self._fail(transfer, refusal(ErrorCode.OFFER_GONE, text))
            return
        told = transfer.view.told_of(transfer.source.pool, grant)
        if transfer.state is State.CLAIMING:
            self._use(transfer, grant, told=told)
        elif told:
            self._requests.answered(transfer)
            transfer.granted = True

    def _use(self, transfer: Transfer, grant: Grant, *, told: bool) -> None:
        """Reads under a grant; later, unless the peer has `told` us about the pool that it grants."""
        try:
            if not told and not self._reroute(transfer, grant):
                transfer.early_grant = grant
                if not transfer.pull.routing:  # otherwise it waits for a route, and not for word from the peer
                    call(self._handshake.need, transfer.address, worker=transfer.pull.key[0], stale=True)
                return
            grows = not transfer.told.whole
            planned = not grows and self._plans.plan(transfer)
        except KvdError as error:
            self._fail(transfer, error)
            return
        transfer.early_grant = None
        transfer.granted = True
        transfer.generation = grant.generation
        read = Event.GROWS if grows else Event.GRANTED if planned else Event.UNPLANNED
        self._step(transfer, Event.HOLD if transfer.pull.hold else read)

    def grown(self, transfer: Transfer, grown: Grown) -> None:
        """Reads what an offer has grown by. An answer to an earlier question is dropped: what it says is known."""
        if transfer.state is not State.FOLLOWING or grown.seen != transfer.told.parts:
            return
        self._requests.answered(transfer)
        try:
            self._grow(transfer.pull, sum(len(span.ids) for span in grown.spans))
            transfer.told = transfer.told.more(grown, transfer.source.pool.spec.groups)
            planned = self._plans.plan(transfer)
        except KvdError as error:
            self._fail(transfer, error)
            return
        self._step(transfer, Event.GREW if planned else Event.UNPLANNED)

    def _reroute(self, transfer: Transfer, grant: Grant) -> bool:
        """Routes anew, to the pool that is granted; False if the peer has not told us about it, or if that takes long.

        Raises:
            KvdError: that pool does not fit.

        """
        pull, rank = transfer.pull, transfer.rank
        view = self._producers.ready.get(rank.address)
        if view is None:
            return False
        pool = view.pools.get(rank.pool)
        if pool is None or not view.told_of(pool, grant):
            return False
        self._plans.drop(transfer)
        self._plans.ended(transfer)
        pull.views[rank.address] = view
        found = self._producers.find(pull)
        if found is None:
            return False
        sources = {source.rank: source for source in found}
        transfer.source = sources.get(transfer.source.rank, transfer.source)
        return True


_NOT_BELIEVED: Final = frozenset({ErrorCode.BAD_TICKET, ErrorCode.OFFER_GONE})


class Refusals:
    """Makes them events of transfers, by `step`: some at a time, if they are many. `transfers` are the open ones."""

    def __init__(
        self,
        context: ActorContext,
        scheduler: Actor,
        requests: PeerRequests,
        *,
        transfers: Mapping[int, Transfer],
        step: Callable[[Transfer, Event, KvdError | None], None],
    ) -> None:
        self._context = context
        self._requests = requests
        self._transfers = transfers
        self._step = step
        self._failing: Batch[Transfer] = Batch(scheduler, self._fail, lambda _: limits.BLOCKS_PER_PULL)
        """Those that may be many at once."""
        self._once = WarnOnce(structlog.get_logger("kvd.scheduler"), "kvd_tickets_refused_total")

    def refused(self, transfer: Transfer, error: KvdError) -> None:
        """A producer refuses the claim of an open transfer, or holds its lease no more."""
        self._requests.answered(transfer)
        if transfer.state is State.CLAIMING and error.code in _NOT_BELIEVED:
            self._ticket_refused(transfer, error)
        if transfer.state is State.HOLDING and error.code is ErrorCode.LEASE_BROKEN:
            self._step(transfer, Event.STOP, None)  # its reader has finished; other ranks' leases are held on
        else:
            self._step(transfer, Event.REFUSED, error)

    def _ticket_refused(self, transfer: Transfer, error: KvdError) -> None:
        """Counts a ticket that the producer does not know (any more): who makes tickets up shows in this."""
        rank, worker = transfer.rank, transfer.pull.key[0]
        self._context.metrics.tickets_refused.labels(error.code).inc()
        self._once.warn(
            "ticket refused",
            worker,
            worker=worker,
            producer=rank.daemon,
            pool=rank.pool,
            code=error.code,
            text=error.text,
        )

    def broken(self, address: str, broken: Broken) -> None:
        """A producer holds these leases no more; it may name one again and again."""
        error = None
        for number in broken.claims:
            transfer = self._transfers.get(number)
            if transfer is not None and transfer.address == address and transfer.failing is None:
                transfer.failing = error = error or error_from_code(broken.code, broken.text)
                self._failing.put(transfer)

    def lose(self, address: str, error: KvdError) -> None:
        """What was asked of this peer is lost."""
        for transfer in self._transfers.values():
            if transfer.address == address:
                transfer.failing, transfer.lost = error, True
                self._failing.put(transfer)

    def _fail(self, failing: list[Transfer]) -> None:
        for transfer in failing:
            if transfer.number not in self._transfers:
                continue  # it has ended meanwhile
            assert transfer.failing is not None  # noqa: S101 - set by whatever put it here
            if transfer.lost and transfer.state not in OPEN | TELLING:
                self._requests.release(transfer)  # messages may still pass where the transport does not
            self.refused(transfer, transfer.failing)
