"""Pulls that were cancelled before their producers' daemons were known, until these can be told."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvd import limits
from kvd.actors.runtime.actor import Actor
from kvd.actors.runtime.batch import InBatches
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.deadlines import Deadlines
from kvd.actors.scheduler.pulls import Pull


@dataclass(slots=True)
class _OfPool:
    """The pulls of one pool, the oldest first."""

    pulls: dict[Pull, None] = field(default_factory=dict)
    ticket_bytes: int = 0


class LeavingPulls:
    """They have ended for their workers.

    `give_up` is called for those that are older than the `tombstone` setting, whose pool is gone, and for the oldest of
    a pool with more than their bounds: the offers of these end by their time.
    """

    def __init__(self, context: ActorContext, actor: Actor, give_up: Callable[[Pull], None]) -> None:
        self._context = context
        self._give_up = give_up
        self._by_pool: dict[int, _OfPool] = {}
        self._due: Deadlines[Pull] = Deadlines(context.loop, InBatches(actor, self._overdue))

    def __iter__(self) -> Iterator[Pull]:
        return (pull for of_pool in self._by_pool.values() for pull in of_pool.pulls)

    def add(self, pull: Pull) -> None:
        """Keeps a pull, whose blocks have been given back."""
        pull.blocks, pull.span = (), None
        of_pool = self._by_pool.setdefault(pull.pool.id, _OfPool())
        of_pool.pulls[pull] = None
        of_pool.ticket_bytes += pull.ticket_bytes
        self._due.set(pull, self._context.loop.time() + self._context.settings.tombstone)
        while len(of_pool.pulls) > limits.MAX_LEAVING_PULLS or of_pool.ticket_bytes > limits.MAX_LEAVING_TICKET_BYTES:
            self._drop(next(iter(of_pool.pulls)))

    def discard(self, pull: Pull) -> None:
        """Forgets a pull, if it is kept."""
        of_pool = self._by_pool.get(pull.pool.id)
        if of_pool is None or pull not in of_pool.pulls:
            return
        del of_pool.pulls[pull]
        of_pool.ticket_bytes -= pull.ticket_bytes
        self._due.unset(pull)
        if not of_pool.pulls:
            del self._by_pool[pull.pool.id]

    def end(self, pool: int) -> None:
        """Gives up those of a pool that is gone."""
        for pull in list(self._by_pool.get(pool, _OfPool()).pulls):
            self._drop(pull)

    def _overdue(self, pull: Pull) -> None:
        of_pool = self._by_pool.get(pull.pool.id)
        if of_pool is not None and pull in of_pool.pulls:
            self._drop(pull)

    def _drop(self, pull: Pull) -> None:
        self.discard(pull)
        self._give_up(pull)
