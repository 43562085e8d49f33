"""What has ended and is remembered for a while, so that a late request gets the reason."""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from kvd.actors.runtime.actor import Actor

K = TypeVar("K")


class Tombstones(Generic[K]):
    """Calls `forget(key)` for each key, `seconds` after it was buried. If there are more than `most`, the oldest go
    early.
    """

    def __init__(self, actor: Actor, seconds: float, most: int, forget: Callable[[K], None]) -> None:
        self._actor = actor
        self._seconds = seconds
        self._most = most
        self._forget = forget
        self._graves: deque[tuple[float, K]] = deque()

    def __len__(self) -> int:
        return len(self._graves)

    def bury(self, key: K) -> None:
        """Remembers `key` from now on."""
        self._graves.append((self._actor.loop.time() + self._seconds, key))
        if len(self._graves) == 1:
            self._actor.later(self._seconds, self.sweep)
        elif len(self._graves) > self._most:
            self._forget(self._graves.popleft()[1])

    def sweep(self) -> None:
        """Forgets those whose time is over."""
        now = self._actor.loop.time()
        while self._graves and self._graves[0][0] <= now:
            self._forget(self._graves.popleft()[1])
        if self._graves:
            self._actor.later(self._graves[0][0] - now, self.sweep)
