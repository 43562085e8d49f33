"""Plans of reads: small ones at once, large ones on threads, so that nobody else's pulls wait for them."""

from collections.abc import Callable
from functools import partial

from kvd import limits
from kvd.actors.runtime.actor import Actor
from kvd.actors.runtime.loop import Background
from kvd.actors.scheduler.pulls import Transfer
from kvd.actors.scheduler.routes import plan_read
from kvd.errors import KvdError
from kvd.plan import Descriptors


class Plans:
    """Makes one large plan of a worker at a time, `limits.MAX_PLANS` in all; workers take turns.

    `planned` is called with a transfer whose large plan is made or cannot be, unless it was dropped meanwhile.
    """

    def __init__(
        self, actor: Actor, background: Background, planned: Callable[[Transfer, Descriptors | KvdError], None]
    ) -> None:
        self._actor = actor
        self._background = background
        self._planned = planned
        self._queued: dict[str, dict[Transfer, object]] = {}
        """Transfers that wait for a thread, by worker; the worker whose turn is next is the first."""
        self._running: set[str] = set()
        """Workers for whom a thread plans."""

    def plan(self, transfer: Transfer) -> bool:
        """Whether a transfer is planned: if it is large, `planned` is called later.

        Raises:
            KvdError: the blocks cannot be planned (`kvd.actors.scheduler.routes.plan_read`).

        """
        if transfer.descriptors is None and not transfer.is_large:
            transfer.plan()
        elif transfer.descriptors is None and transfer.planning is None:
            transfer.planning = object()
            self._queued.setdefault(transfer.pull.key[0], {})[transfer] = transfer.planning
            self._start()
        return transfer.descriptors is not None

    def drop(self, transfer: Transfer) -> None:
        """The plan is not wanted any more: one that has begun is made for nothing."""
        transfer.planning = None
        worker = transfer.pull.key[0]
        queue = self._queued.get(worker, {})
        if queue.pop(transfer, None) is not None and not queue:
            del self._queued[worker]

    def _start(self) -> None:
        """Gives threads what waits, to each worker in its turn."""
        for worker in [worker for worker in self._queued if worker not in self._running]:
            if len(self._running) >= limits.MAX_PLANS:
                return
            queue = self._queued.pop(worker)
            transfer = next(iter(queue))
            name = queue.pop(transfer)
            if queue:
                self._queued[worker] = queue  # behind those of all others
            self._running.add(worker)
            self._background(_work(transfer), partial(self._actor.soon, self._made, transfer, name))

    def _made(self, transfer: Transfer, name: object, result: Descriptors | KvdError) -> None:
        self._running.discard(transfer.pull.key[0])
        if transfer.planning is name:
            transfer.planning = None
            self._planned(transfer, result)
        self._start()


def _work(transfer: Transfer) -> Callable[[], Descriptors]:
    """The plan of a transfer as it is now, and the size of what it moves: 10 ms for the largest."""
    source, pull = transfer.source, transfer.pull
    arguments = source, pull.ticket, pull.blocks, len(pull.pool.spec.groups)

    def work() -> Descriptors:
        made = plan_read(*arguments)
        _ = made.bytes  # which is kept
        return made

    return work
