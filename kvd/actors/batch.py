"""Many things that happen at once, for one message: a mailbox must not grow with how many they are."""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Batch(Generic[T]):
    """What was put since it was last taken; `due()` is called with the first of it."""

    def __init__(self, due: Callable[[], None]) -> None:
        self._due = due
        self._items: list[T] = []

    def put(self, item: T) -> None:
        """One more."""
        self._items.append(item)
        if len(self._items) == 1:
            self._due()

    def take(self) -> list[T]:
        """All of it, in the order it was put."""
        items, self._items = self._items, []
        return items
