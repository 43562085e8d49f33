"""Bounds how many keys run at once; the rest queue by priority."""

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class PrioritySlots(Generic[K]):
    """At most `slots` keys run. Urgent ones are next; their owners take turns, so one with many delays only itself.

    Keys of one owner, and keys that are not urgent, are first come, first served.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._in: set[K] = set()
        self._urgent: dict[str, dict[K, None]] = {}
        """By owner."""
        self._patient: dict[K, None] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._in

    @property
    def waiting(self) -> int:
        """How many keys wait."""
        return sum(map(len, self._urgent.values())) + len(self._patient)

    def enter(self, key: K, *, urgent: bool, owner: str = "") -> bool:
        """Whether `key` runs, already or from now on; else it waits."""
        if key not in self._in and len(self._in) < self._slots:
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
        """Makes a waiting key urgent."""
        if key in self._patient:
            self.enter(key, urgent=True, owner=owner)

    def leave(self, key: K) -> None:
        """Frees the slot of a key; one that waits goes on waiting."""
        self._in.discard(key)

    def forget(self, key: K) -> None:
        """Frees the slot of a key, or takes it out of the queue."""
        for keys in (*self._urgent.values(), self._patient):
            keys.pop(key, None)
        self._urgent = {owner: keys for owner, keys in self._urgent.items() if keys}
        self._in.discard(key)

    def next(self) -> K | None:
        """Starts the next key and returns it; None if none waits or no slot is free."""
        if not self.waiting or len(self._in) >= self._slots:
            return None
        owner = next(iter(self._urgent), None)
        queue = self._patient if owner is None else self._urgent.pop(owner)
        key = next(iter(queue))
        del queue[key]
        if owner is not None and queue:
            self._urgent[owner] = queue
        self._in.add(key)
        return key
