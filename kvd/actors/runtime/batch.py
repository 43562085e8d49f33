"""Many things that happen at once, in few messages: a mailbox must not grow with their number."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from kvd import limits
from kvd.actors.runtime.actor import Actor

T = TypeVar("T")


class Batch(Generic[T]):
    """Collects items; `due()` is called with the first one, and again for those that `take` has left."""

    def __init__(self, due: Callable[[], None]) -> None:
        self._due = due
        self._items: list[T] = []
        self._called = False

    def put(self, item: T) -> None:
        """Adds an item."""
        self._items.append(item)
        if not self._called:
            self._called = True
            self._due()

    def take(self) -> Iterator[T]:
        """As many items as one message handles, in order; what they cause goes ahead of the next `due()`."""
        items, self._items = self._items[: limits.BATCH_ITEMS], self._items[limits.BATCH_ITEMS :]
        yield from items
        self._called = bool(self._items)
        if self._called:
            self._due()


class InBatches(Batch[T]):
    """Calls `handle(item)` for each item that it is called with, in messages to `actor`."""

    def __init__(self, actor: Actor, handle: Callable[[T], None]) -> None:
        super().__init__(lambda: actor.soon(self._handle_some))
        self._handle = handle

    def __call__(self, item: T) -> None:
        """Adds an item."""
        self.put(item)

    def _handle_some(self) -> None:
        for item in self.take():
            self._handle(item)
