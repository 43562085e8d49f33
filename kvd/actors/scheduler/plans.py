"""Plans of reads: small ones at once, large ones on threads, so that nobody else's pulls wait for them."""

from collections import Counter
from collections.abc import Callable

from kvd import limits
from kvd.actors.runtime.actor import Actor, Background
from kvd.actors.scheduler.routes import parts, plan_read
from kvd.actors.scheduler.transfer import Transfer
from kvd.errors import KvdError
from kvd.plan import Descriptors


class Plans:
    """Makes one part of a large plan of a worker at a time, `limits.MAX_PLANS` in all, and one ahead of what is read.

    The user with the fewest plans on threads comes first; users take turns, and each user's workers do. One whose reads
    have `limits.MAX_PLANNED` descriptors waits until some of them have ended.

    `planned` is called with a transfer of whose large plan a part is made or cannot be, unless it was dropped.
    """

    def __init__(
        self, actor: Actor, background: Background, planned: Callable[[Transfer, Descriptors | KvdError], None]
    ) -> None:
        self._actor = actor
        self._background = background
        self._planned = planned
        self._queued: dict[int, dict[str, dict[Transfer, object]]] = {}
        """Transfers that wait for a thread, by user and worker; the first of each is next."""
        self._running: dict[str, int] = {}
        """Workers for whom a thread plans, with their users."""
        self._planned_of: Counter[int] = Counter()
        """Descriptors of reads that are planned and have not ended, by user."""

    def is_at_once(self, transfer: Transfer) -> bool:
        """Whether a transfer can be planned without a thread and without waiting."""
        return not transfer.is_large and self._has_room(transfer.pull.pool.uid)

    def plan(self, transfer: Transfer) -> bool:
        """Whether a transfer is planned: if it is large, or its user's others are too many, `planned` is called later.

        Raises:
            KvdError: the blocks cannot be planned (`kvd.actors.scheduler.routes.plan_read`).

        """
        if transfer.descriptors is None and self.is_at_once(transfer):
            self.drop(transfer)  # it may have waited for room, and still wait for its worker's turn at a thread
            self.plan_now(transfer)
        elif transfer.descriptors is None and transfer.planning is None:
            pull = transfer.pull
            transfer.parts = parts(transfer.source, transfer.told, pull.blocks, pull.pool.spec.groups)
            self._queue(transfer)
            self._start()
        return transfer.descriptors is not None

    def landed(self, transfer: Transfer) -> None:
        """The first part of a plan has landed, and another one is to be read, which may be planned already."""
        transfer.parts = transfer.parts[1:]
        transfer.descriptors, transfer.ahead = transfer.ahead, None
        self._planned_ahead(transfer)
        self._start()

    def plan_now(self, transfer: Transfer) -> None:
        """Plans a small transfer.

        Raises:
            KvdError: see `plan`.

        """
        transfer.plan()
        self._count(transfer)

    def ended(self, transfer: Transfer) -> None:
        """Its read has ended, or will not begin: its plan is not needed any more."""
        transfer.descriptors = transfer.ahead = None
        transfer.parts = ()
        if transfer.planned:
            self._count(transfer)
            self._start()

    def _count(self, transfer: Transfer) -> None:
        uid = transfer.pull.pool.uid
        planned = sum(each.count for each in (transfer.descriptors, transfer.ahead) if each is not None)
        self._planned_of[uid] += planned - transfer.planned
        transfer.planned = planned
        if not self._planned_of[uid]:
            del self._planned_of[uid]

    def _has_room(self, uid: int) -> bool:
        return self._planned_of[uid] < limits.MAX_PLANNED

    def drop(self, transfer: Transfer) -> None:
        """The plan is not wanted any more: one that has begun is made for nothing."""
        transfer.planning = None
        pool = transfer.pull.pool
        if transfer in self._queued.get(pool.uid, {}).get(pool.name, {}):
            self._take(transfer)

    def _queue(self, transfer: Transfer) -> None:
        """Has the next part of it planned that is not."""
        pool, transfer.planning = transfer.pull.pool, object()
        self._queued.setdefault(pool.uid, {}).setdefault(pool.name, {})[transfer] = transfer.planning

    def _planned_ahead(self, transfer: Transfer) -> None:
        """Its plans are others than before: plans ahead if that is to be done, and is not being done."""
        self._count(transfer)
        if transfer.ahead is None and transfer.planning is None and len(transfer.parts) > 1:
            self._queue(transfer)

    def _start(self) -> None:
        """Gives threads what waits."""
        while len(self._running) < limits.MAX_PLANS and (transfer := self._next()) is not None:
            pool, name = transfer.pull.pool, self._take(transfer)
            if workers := self._queued.pop(pool.uid, None):
                self._queued[pool.uid] = workers  # behind all other users
                if transfers := workers.pop(pool.name, None):
                    workers[pool.name] = transfers
            self._running[pool.name] = pool.uid
            self._make(transfer, name)

    def _make(self, transfer: Transfer, name: object) -> None:
        self._background(_work(transfer), lambda result: self._actor.call(self._made, transfer, name, result))

    def _next(self) -> Transfer | None:
        """What a thread gets next; None if nothing may be given to one."""
        plans = Counter(self._running.values())
        for uid in sorted(self._queued, key=lambda uid: plans[uid]):
            for worker, transfers in self._queued[uid].items() if self._has_room(uid) else ():
                if worker not in self._running:
                    return next(iter(transfers))
        return None

    def _take(self, transfer: Transfer) -> object:
        """Takes a transfer out of what waits. Returns the name of its plan."""
        pool = transfer.pull.pool
        workers = self._queued[pool.uid]
        name = workers[pool.name].pop(transfer)
        if not workers[pool.name]:
            del workers[pool.name]
        if not workers:
            del self._queued[pool.uid]
        return name

    def _made(self, transfer: Transfer, name: object, result: Descriptors | KvdError) -> None:
        del self._running[transfer.pull.pool.name]
        if transfer.planning is name:
            transfer.planning = None
            if isinstance(result, Descriptors):
                if transfer.descriptors is None:
                    transfer.descriptors = result
                else:
                    transfer.ahead = result
                self._planned_ahead(transfer)
            self._planned(transfer, result)
        self._start()


def _work(transfer: Transfer) -> Callable[[], Descriptors]:
    """The plan of the first part of a transfer that is not planned, and the size of what it moves."""
    source, pull = transfer.source, transfer.pull
    part = transfer.parts[transfer.descriptors is not None]
    arguments = source, transfer.told, part, pull.blocks

    def work() -> Descriptors:
        made = plan_read(*arguments)
        _ = made.bytes  # which is kept
        return made

    return work
