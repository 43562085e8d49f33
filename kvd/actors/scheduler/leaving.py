"""What is kept of pulls that were cancelled early, until their producers have been told."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvd import limits
from kvd.actors.runtime.actor import Actor
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.deferred import Batch, Deadlines
from kvd.actors.scheduler.pull import Pull

T = TypeVar("T")


@dataclass(slots=True)
class _OfPool(Generic[T]):
    """What is kept of one pool's pulls, the oldest first, each with its part of a ticket's bytes."""

    items: dict[T, int] = field(default_factory=dict)
    ticket_bytes: int = 0

    @property
    def is_over(self) -> bool:
        return len(self.items) > limits.MAX_LEAVING or self.ticket_bytes > limits.MAX_LEAVING_TICKET_BYTES


class Leaving(Generic[T]):
    """Pulls, or transfers of pulls, that have ended for their workers; their blocks have been given back.

    `give_up` is called for the oldest of a pool with more than their bounds: the offers of these end by their time.
    """

    def __init__(self, give_up: Callable[[T], None]) -> None:
        self._give_up = give_up
        self._by_pool: dict[int, _OfPool[T]] = {}

    def __iter__(self) -> Iterator[T]:
        return (item for of_pool in self._by_pool.values() for item in of_pool.items)

    def add(self, item: T, pool: int, ticket_bytes: int) -> None:
        """Keeps `item` of the pool with the id `pool`."""
        of_pool = self._by_pool.setdefault(pool, _OfPool())
        of_pool.items[item] = ticket_bytes
        of_pool.ticket_bytes += ticket_bytes
        while of_pool.is_over:
            oldest = next(iter(of_pool.items))
            self.discard(oldest, pool)
            self._give_up(oldest)

    def discard(self, item: T, pool: int) -> bool:
        """Forgets `item`; False if it is not kept."""
        of_pool = self._by_pool.get(pool)
        if of_pool is None or item not in of_pool.items:
            return False
        of_pool.ticket_bytes -= of_pool.items.pop(item)
        if not of_pool.items:
            del self._by_pool[pool]
        return True

    def of(self, pool: int) -> list[T]:
        """What is kept of one pool."""
        return list(self._by_pool[pool].items) if pool in self._by_pool else []


class LeavingPulls:
    """Pulls that were cancelled before their producers' daemons were known.

    `give_up` is also called for those that are older than the `tombstone` setting, or whose pool is gone.
    """

    def __init__(self, context: ActorContext, actor: Actor, give_up: Callable[[Pull], None]) -> None:
        self._context = context
        self._give_up = give_up
        self._kept: Leaving[Pull] = Leaving(give_up)
        self._due: Deadlines[Pull] = Deadlines(context.loop, Batch(actor, self._drop_all).put)

    def __iter__(self) -> Iterator[Pull]:
        return iter(self._kept)

    def add(self, pull: Pull) -> None:
        """Keeps a pull, whose blocks have been given back."""
        pull.blocks, pull.span = (), None
        self._due.set(pull, self._context.loop.time() + self._context.settings.tombstone)
        self._kept.add(pull, pull.pool.id, pull.ticket_bytes)

    def discard(self, pull: Pull) -> None:
        """Forgets a pull, if it is kept."""
        self._due.unset(pull)
        self._kept.discard(pull, pull.pool.id)

    def end(self, pool: int) -> None:
        """Gives up those of a pool that is gone."""
        for pull in self._kept.of(pool):
            self._drop(pull)

    def _drop_all(self, pulls: list[Pull]) -> None:
        for pull in pulls:
            self._drop(pull)

    def _drop(self, pull: Pull) -> None:
        self._due.unset(pull)
        if self._kept.discard(pull, pull.pool.id):
            self._give_up(pull)
