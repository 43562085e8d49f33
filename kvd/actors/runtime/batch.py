"""Many things that happen at once, for few messages: a mailbox must not grow with how many they are."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from kvd import limits

T = TypeVar("T")


class Batch(Generic[T]):
    """What was put and not taken; `due()` is called with the first of it, and for what `take` has left."""

    def __init__(self, due: Callable[[], None]) -> None:
        self._due = due
        self._items: list[T] = []
        self._called = False

    def put(self, item: T) -> None:
        """One more."""
        self._items.append(item)
        if not self._called:
            self._called = True
            self._due()

    def take(self) -> Iterator[T]:
        """As much as one message handles, in the order it was put; what that tells goes ahead of the next `due()`."""
        items, self._items = self._items[: limits.BATCH_ITEMS], self._items[limits.BATCH_ITEMS :]
        yield from items
        self._called = bool(self._items)
        if self._called:
            self._due()
