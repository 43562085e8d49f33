"""Who of many may be at it: so many at a time, the others wait for their turn."""

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Turns(Generic[K]):
    """Keys that are in, at most `places` of them, and keys that wait: the urgent ones first, then as they came."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._in: set[K] = set()
        self._urgent: dict[K, None] = {}
        self._patient: dict[K, None] = {}

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._urgent) + len(self._patient)

    def enter(self, key: K, *, urgent: bool) -> bool:
        """Whether `key` is in, from now on or since before; else it waits."""
        if key not in self._in and len(self._in) < self._places:
            self.forget(key)
            self._in.add(key)
        if key in self._in:
            return True
        if urgent:
            self._patient.pop(key, None)
            self._urgent[key] = None
        elif key not in self._urgent:
            self._patient[key] = None
        return False

    def hurry(self, key: K) -> None:
        """Makes a key that waits urgent."""
        if key in self._patient:
            del self._patient[key]
            self._urgent[key] = None

    def leave(self, key: K) -> None:
        """Gives the place of a key back; one that waits goes on waiting."""
        self._in.discard(key)

    def forget(self, key: K) -> None:
        """Neither in nor waiting any more."""
        for keys in (self._urgent, self._patient):
            keys.pop(key, None)
        self._in.discard(key)

    def next(self) -> K | None:
        """Lets the next one in and says which; None where nobody waits or no place is free."""
        queue = self._urgent or self._patient
        if not queue or len(self._in) >= self._places:
            return None
        key = next(iter(queue))
        del queue[key]
        self._in.add(key)
        return key
