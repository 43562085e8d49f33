"""What producers grant, and tell of offers that grow: whether a transfer may read it, by which route and plan."""

from collections.abc import Callable

from kvd.actors.handshake.actor import HandshakeActor
from kvd.actors.runtime.actor import call
from kvd.actors.scheduler.peer_requests import PeerRequests
from kvd.actors.scheduler.plans import Plans
from kvd.actors.scheduler.producers import Producers
from kvd.actors.scheduler.pull import Pull
from kvd.actors.scheduler.transfer import Event, State, Transfer
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.protocol.peer import Grant, Grown


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
        if rank.address not in self._producers:
            return False
        view = self._producers[rank.address]
        pool = view.pools.get(rank.pool)
        if pool is None or not view.told_of(pool, grant):
            return False
        self._plans.drop(transfer)
        self._plans.ended(transfer)
        pull.views[rank.address] = view
        found = self._producers.routes.find(pull)
        if found is None:
            return False
        sources = {source.rank: source for source in found}
        transfer.source = sources.get(transfer.source.rank, transfer.source)
        return True
