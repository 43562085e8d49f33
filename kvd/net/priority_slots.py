"""Bounds how many keys run at once; the rest queue by priority."""

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class PrioritySlots(Generic[K]):
    """At most `slots` keys run, and `share` of one party, if it is named: others find room however slow it is.

    Urgent keys are next; their owners take turns, so one with many delays only itself, and a key of several owners runs
    in the turn that comes first. Keys of one owner, and keys that are not urgent, are first come, first served.
    """

    def __init__(self, slots: int, share: int | None = None) -> None:
        self._slots = slots
        self._share = slots if share is None else share
        self._in: dict[K, str] = {}
        """Those that run, each with its party."""
        self._of_party: Counter[str] = Counter()
        self._urgent: dict[str, dict[K, str]] = {}
        """By owner; each with its party."""
        self._patient: dict[K, str] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._in

    def enter(self, key: K, *, urgent: bool, owner: str = "", party: str = "") -> bool:
        """Whether `key` runs, already or from now on; else it waits."""
        if key not in self._in and self._has_room(party):
            self.forget(key)
            self._run(key, party)
        if key in self._in:
            return True
        if urgent:
            self._make_urgent(key, owner, party)
        elif not self.waits(key):
            self._patient[key] = party
        return False

    def hurry(self, key: K, owner: str = "") -> None:
        """Makes a waiting key urgent, for this owner as well."""
        for keys in (self._patient, *self._urgent.values()):
            if key in keys:
                self._make_urgent(key, owner, keys[key])
                return

    def waits(self, key: K) -> bool:
        """Whether `key` waits for a slot."""
        return any(key in keys for keys in (self._patient, *self._urgent.values()))

    def leave(self, key: K) -> None:
        """Frees the slot of a key; one that waits goes on waiting."""
        if key in self._in:
            self._of_party -= Counter([self._in.pop(key)])

    def forget(self, key: K) -> None:
        """Frees the slot of a key, or takes it out of the queue."""
        for keys in (*self._urgent.values(), self._patient):
            keys.pop(key, None)
        self._urgent = {owner: keys for owner, keys in self._urgent.items() if keys}
        self.leave(key)

    def release(self, owner: str) -> None:
        """Keys that nobody but this owner is in a hurry for are not urgent any more."""
        for key, party in self._urgent.pop(owner, {}).items():
            if not self.waits(key):
                self._patient[key] = party

    def next(self) -> K | None:
        """Starts the next key and returns it; None if none waits that a slot is free for."""
        if len(self._in) >= self._slots:
            return None
        for owner, queue in self._urgent.items():
            if (key := self._first(queue)) is not None:
                party = queue[key]
                self._urgent[owner] = self._urgent.pop(owner)
                self.forget(key)
                self._run(key, party)
                return key
        if (key := self._first(self._patient)) is not None:
            self._run(key, self._patient.pop(key))
        return key

    def _first(self, queue: dict[K, str]) -> K | None:
        return next((key for key, party in queue.items() if self._has_room(party)), None)

    def _make_urgent(self, key: K, owner: str, party: str) -> None:
        self._patient.pop(key, None)
        self._urgent.setdefault(owner, {})[key] = party

    def _run(self, key: K, party: str) -> None:
        self._in[key] = party
        self._of_party[party] += 1

    def _has_room(self, party: str) -> bool:
        return len(self._in) < self._slots and (not party or self._of_party[party] < self._share)
