"""Bounds how many keys run at once; the rest queue by priority."""

from collections import Counter
from collections.abc import Callable, Collection, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class PrioritySlots(Generic[K]):
    """At most `slots` keys run, and `share` of one party, if it is named: others find room however slow it is.

    Urgent keys are next; their owners take turns, so one with many delays only itself, and a key of several owners runs
    in the turn that comes first, as a key of the party that it has there. The parties of one owner's keys take turns,
    too, and those of keys that are not urgent; keys of one party are first come, first served.
    """

    def __init__(self, slots: int, share: int | None = None) -> None:
        self._slots = slots
        self._share = slots if share is None else share
        self._in: dict[K, str] = {}
        """Those that run, each with its party."""
        self._of_party: Counter[str] = Counter()
        self._urgent: dict[str, _Queue[K]] = {}
        """By owner."""
        self._patient: _Queue[K] = _Queue()
        self._owners: dict[K, dict[str, None]] = {}
        """Of each key that waits; a patient one has none."""

    def __contains__(self, key: K) -> bool:
        return key in self._in

    def enter(self, key: K, owners: Collection[str] = (), party: str = "") -> bool:
        """Whether `key` runs, already or from now on; else it waits, and is urgent if it has owners."""
        if key not in self._in and self._has_room(party):
            self._run(key, party)
        if key in self._in:
            return True
        for owner in owners:
            self._make_urgent(key, owner, party)
        if key not in self._owners:
            self._owners[key] = {}
            self._patient.put(key, party)
        return False

    def hurry(self, key: K, owner: str) -> None:
        """Makes a waiting key urgent, for this owner as well."""
        if key in self._owners:
            first = next(iter(self._owners[key]), None)
            queue = self._patient if first is None else self._urgent[first]
            self._make_urgent(key, owner, queue.parties[key])

    def waits(self, key: K) -> bool:
        """Whether `key` waits for a slot."""
        return key in self._owners

    def leave(self, key: K) -> None:
        """Frees the slot of a key; one that waits goes on waiting."""
        if key in self._in:
            self._of_party -= Counter([self._in.pop(key)])

    def forget(self, key: K) -> None:
        """Frees the slot of a key, or takes it out of the queue."""
        self._patient.discard(key)
        for owner in self._owners.pop(key, {}):
            self._urgent[owner].discard(key)
            if not self._urgent[owner].parties:
                del self._urgent[owner]
        self.leave(key)

    def release(self, owner: str) -> None:
        """Keys that nobody but this owner is in a hurry for are not urgent any more."""
        for key, party in self._urgent.pop(owner, _Queue()).parties.items():
            del self._owners[key][owner]
            if not self._owners[key]:
                self._patient.put(key, party)

    def next(self) -> K | None:
        """Starts the next key and returns it; None if none waits that a slot is free for."""
        if len(self._in) >= self._slots:
            return None
        for owner, queue in self._urgent.items():
            if (key := queue.next(self._has_room)) is not None:
                self._urgent[owner] = self._urgent.pop(owner)
                self._run(key, queue.parties[key])
                return key
        if (key := self._patient.next(self._has_room)) is not None:
            self._run(key, self._patient.parties[key])
        return key

    def _make_urgent(self, key: K, owner: str, party: str) -> None:
        self._patient.discard(key)
        self._owners.setdefault(key, {})[owner] = None
        self._urgent.setdefault(owner, _Queue()).put(key, party)

    def _run(self, key: K, party: str) -> None:
        self.forget(key)
        self._in[key] = party
        self._of_party[party] += 1

    def _has_room(self, party: str) -> bool:
        return len(self._in) < self._slots and (not party or self._of_party[party] < self._share)


class _Queue(Generic[K]):
    """Keys that wait, each of a party. `next` looks at no more parties than have used up their shares, and one."""

    def __init__(self) -> None:
        self.parties: dict[K, str] = {}
        self._keys: dict[str, dict[K, None]] = {}
        """By party; the first is next."""

    def put(self, key: K, party: str) -> None:
        if self.parties.get(key, party) != party:
            self.discard(key)
        self.parties[key] = party
        self._keys.setdefault(party, {})[key] = None

    def discard(self, key: K) -> None:
        if key in self.parties:
            party = self.parties.pop(key)
            del self._keys[party][key]
            if not self._keys[party]:
                del self._keys[party]

    def next(self, has_room: Callable[[str], bool]) -> K | None:
        """The key that is next, which stays here; its party is the last from now on."""
        for party, keys in self._keys.items():
            if has_room(party):
                self._keys[party] = self._keys.pop(party)
                return next(iter(keys))
        return None
