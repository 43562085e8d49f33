"""Who of many may be at it: so many at a time, the others wait for their turn.

Whoever makes many urgent waits for its own: owners of urgent keys take turns.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class PrioritySlots(Generic[K]):
    """Keys that are in, at most `places` of them, and keys that wait: the urgent ones first.

    Owners of urgent keys take turns; keys of one owner, and those that are not urgent, come as they came.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._in: set[K] = set()
        self._urgent: dict[str, dict[K, None]] = {}
        """By owner."""
        self._patient: dict[K, None] = {}

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(map(len, self._urgent.values())) + len(self._patient)

    def enter(self, key: K, *, urgent: bool, owner: str = "") -> bool:
        """Whether `key` is in, from now on or since before; else it waits."""
        if key not in self._in and len(self._in) < self._places:
            self.forget(key)
            self._in.add(key)
        if key in self._in:
            return True
        if urgent:
            self._patient.pop(key, None)
            self._urgent.setdefault(owner, {})[key] = None
        elif not any(key in keys for keys in self._urgent.values()):
            self._patient[key] = None
        return False

    def hurry(self, key: K, owner: str = "") -> None:
        """Makes a key that waits urgent."""
        if key in self._patient:
            self.enter(key, urgent=True, owner=owner)

    def leave(self, key: K) -> None:
        """Gives the place of a key back; one that waits goes on waiting."""
        self._in.discard(key)

    def forget(self, key: K) -> None:
        """Neither in nor waiting any more."""
        for keys in (*self._urgent.values(), self._patient):
            keys.pop(key, None)
        self._urgent = {owner: keys for owner, keys in self._urgent.items() if keys}
        self._in.discard(key)

    def next(self) -> K | None:
        """Lets the next one in and says which; None where nobody waits or no place is free."""
        if not self.waiting or len(self._in) >= self._places:
            return None
        owner = next(iter(self._urgent), None)
        queue = self._patient if owner is None else self._urgent.pop(owner)
        key = next(iter(queue))
        del queue[key]
        if owner is not None and queue:
            self._urgent[owner] = queue
        self._in.add(key)
        return key
