"""Producers that refuse claims, break leases, or are lost: what was asked of them fails."""

from collections.abc import Callable, Mapping
from typing import Final

import structlog

from kvd import limits
from kvd.actors.runtime.actor import Actor
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.deferred import Batch
from kvd.actors.runtime.pace import WarnOnce
from kvd.actors.scheduler.peer_requests import PeerRequests
from kvd.actors.scheduler.transfer import OPEN, TELLING, Event, State, Transfer
from kvd.errors import ErrorCode, KvdError, error_from_code
from kvd.protocol.peer import Broken

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
