"""What has ended and is remembered for a while, so that whoever asks late gets the reason."""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from kvd.actors.runtime.loop import Loop

K = TypeVar("K")


class Tombstones(Generic[K]):
    """Keys in the order they were buried; all are remembered for as long, so the oldest is always the next to go.

    `due()` is called when `sweep()` would forget something. Where there are more than `most`, the oldest go early.
    """

    def __init__(
        self, loop: Loop, seconds: float, most: int, forget: Callable[[K], None], due: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._seconds = seconds
        self._most = most
        self._forget = forget
        self._due = due
        self._graves: deque[tuple[float, K]] = deque()

    def __len__(self) -> int:
        return len(self._graves)

    def bury(self, key: K) -> None:
        """Remembers `key` from now on."""
        self._graves.append((self._loop.time() + self._seconds, key))
        if len(self._graves) == 1:
            self._loop.call_later(self._seconds, self._due)
        elif len(self._graves) > self._most:
            self._forget(self._graves.popleft()[1])

    def sweep(self) -> None:
        """Forgets those whose time is over."""
        now = self._loop.time()
        while self._graves and self._graves[0][0] <= now:
            self._forget(self._graves.popleft()[1])
        if self._graves:
            self._loop.call_later(self._graves[0][0] - now, self._due)
