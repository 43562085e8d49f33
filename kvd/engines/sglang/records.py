"""The records of a pool: which are free, and who waits for one."""

from collections import deque
from collections.abc import Callable

from kvd.limits import MAX_TRANSFER_RECORDS


class Records:
    """Hands out each record to one transfer at a time."""

    def __init__(self) -> None:
        self._free = deque(range(MAX_TRANSFER_RECORDS))
        self._waiting: deque[Callable[[int], None]] = deque()

    def take(self, use: Callable[[int], None]) -> None:
        """Calls `use` with a record, now or when one is given back."""
        if self._free:
            use(self._free.popleft())
        else:
            self._waiting.append(use)

    def give_back(self, record: int) -> None:
        """Nothing reads the record or writes to it any more."""
        if self._waiting:
            self._waiting.popleft()(record)
        else:
            self._free.append(record)
