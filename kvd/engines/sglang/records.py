"""The records of a pool: which are free, and who waits for one."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvd.limits import MAX_TRANSFER_RECORDS


class Room(Protocol):
    """Who has a record, or none: -1."""

    record: int


class Records:
    """Hands out each record to one transfer at a time."""

    def __init__(self) -> None:
        self._free = deque(range(MAX_TRANSFER_RECORDS))
        self._waiting: deque[Callable[[int], None]] = deque()
        self._handing_out = False

    def take(self, use: Callable[[int], None]) -> None:
        """Calls `use` with a record, now or when one is given back."""
        self._waiting.append(use)
        self._hand_out()

    def give_back(self, record: int) -> None:
        """Nothing reads the record or writes to it any more."""
        self._free.append(record)
        self._hand_out()

    def give_back_of(self, room: Room) -> None:
        """The same for that of `room`, if it has one."""
        if room.record >= 0:
            record, room.record = room.record, -1
            self.give_back(record)

    def _hand_out(self) -> None:
        """Serves who waits. One who gives the record back at once is followed by the next, not called within it."""
        if self._handing_out:
            return
        self._handing_out = True
        try:
            while self._free and self._waiting:
                self._waiting.popleft()(self._free.popleft())
        finally:
            self._handing_out = False
