"""Many things that happen at once, in few calls: a mailbox must not grow with their number."""

from collections.abc import Callable
from typing import Generic, TypeVar

from kvd import limits
from kvd.actors.runtime.actor import Actor

T = TypeVar("T")


class Batch(Generic[T]):
    """Collects items, and has `actor` call `handle` with some of them at a time, in order.

    What one call of `handle` causes goes ahead of the next.
    """

    def __init__(self, actor: Actor, handle: Callable[[list[T]], None]) -> None:
        self._actor = actor
        self._handle = handle
        self._items: list[T] = []
        self._called = False

    def put(self, item: T) -> None:
        """Adds an item."""
        self._items.append(item)
        if not self._called:
            self._called = True
            self._actor.call(self._handle_some)

    def _handle_some(self) -> None:
        items, self._items = self._items[: limits.BATCH_ITEMS], self._items[limits.BATCH_ITEMS :]
        self._handle(items)
        self._called = bool(self._items)
        if self._called:
            self._actor.call(self._handle_some)
