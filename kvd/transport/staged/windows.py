"""Who has which window of a pool's arena, and who is next. Pure: no clock and no I/O.

A reader is known by its secret, which only it and we know: messages may come under any name.

The next window goes to the reader with the fewest, and among these to the one that waits longest. Each pool has windows
of its own, so whoever may read one pool keeps no reader of another waiting, under however many secrets.

A window that its reader does not give back, because it was killed, is taken back after `limits.WINDOW_SECONDS` if
others wait: its reader finds another tag on the board, and asks again.

A reader has up to `limits.MAX_STAGED_SLICES` requests. With one more its oldest is from before it lost its connection,
and ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvd import limits
from kvd.transport.slices import U64
from kvd.transport.staged.messages import Wanted

Key = tuple[bytes, int]
"""A request: the reader's secret, and the number."""


@dataclass(slots=True, eq=False)
class Use:
    """A request that has a window. It is `copying` at first, and may end meanwhile."""

    agent: str
    asked: Wanted
    window: int
    copying: bool = True
    ended: bool = False
    since: float = 0.0


@dataclass(slots=True, eq=False)
class _Reader:
    """What one reader waits for, and how many windows it has."""

    waiting: dict[Key, Wanted] = field(default_factory=dict)
    windows: int = 0


class Windows:
    """`count` windows; those that a method returns are to be wiped from the board before anything is copied there."""

    def __init__(self, count: int) -> None:
        self._free = list(reversed(range(count)))
        self._uses: dict[Key, Use] = {}
        self._readers: dict[bytes, _Reader] = {}
        self._queued: dict[Key, str] = {}
        """The agent in whose name each request came that has no window."""

    @property
    def in_use(self) -> int:
        """How many are taken."""
        return len(self._uses)

    @property
    def waiting(self) -> int:
        """How many requests wait for one."""
        return len(self._queued)

    def ask(self, agent: str, asked: Wanted) -> bool:
        """Queues a request; False if too many wait, or this one does already."""
        key = (asked.secret, asked.number)
        if key in self._uses or key in self._queued or len(self._queued) >= limits.MAX_STAGED_REQUESTS:
            return False
        self._readers.setdefault(asked.secret, _Reader()).waiting[key] = asked
        self._queued[key] = agent
        return True

    def end_oldest(self, secret: bytes) -> int | None:
        """Ends the oldest request of a reader that is about to have too many. Its window as for `finish`."""
        requests = [key for key, use in self._uses.items() if use.asked.secret == secret and not use.ended]
        requests += self._readers[secret].waiting if secret in self._readers else ()
        return self.finish(requests[0]) if len(requests) >= limits.MAX_STAGED_SLICES else None

    def end_all(self) -> list[int]:
        """Ends all requests: no reader is there any more. The windows that are free now."""
        ended = [self.finish(key) for key in (*self._queued, *self._uses)]
        return [window for window in ended if window is not None]

    def next(self) -> Use | None:
        """Gives a free window to whose turn it is; its use is `copying`."""
        if not self._free or not self._queued:
            return None
        waiting = [(reader.windows, secret) for secret, reader in self._readers.items() if reader.waiting]
        _, secret = min(waiting, key=lambda entry: entry[0])  # the first of these has waited longest
        reader = self._readers[secret] = self._readers.pop(secret)
        key = next(iter(reader.waiting))
        reader.windows += 1
        use = self._uses[key] = Use(self._queued.pop(key), reader.waiting.pop(key), self._free.pop())
        return use

    def copied(self, use: Use, now: float) -> bool:
        """Its window may be shown to the reader; False if that has ended, and the window is free."""
        use.copying, use.since = False, now
        if use.ended:
            self._release(use)
        return not use.ended

    def finish(self, key: Key) -> int | None:
        """The request has ended. Its window if that is free now."""
        use = self._uses.get(key)
        if use is None:
            if self._queued.pop(key, None) is not None:
                del self._readers[key[0]].waiting[key]
                self._forget_idle(key[0])
            return None
        use.ended = True
        if use.copying:
            return None
        self._release(use)
        return use.window

    def take_back(self, now: float) -> list[int]:
        """Frees the windows that readers have had for too long."""
        late = [use for use in self._uses.values() if not use.copying and use.since + limits.WINDOW_SECONDS <= now]
        for use in late:
            self._release(use)
        return [use.window for use in late]

    def next_late(self) -> float | None:
        """When a window is to be taken back next; None if none is, as nobody waits or has one."""
        if not self._queued:
            return None
        since = min((use.since for use in self._uses.values() if not use.copying), default=None)
        return None if since is None else since + limits.WINDOW_SECONDS

    def _release(self, use: Use) -> None:
        del self._uses[use.asked.secret, use.asked.number]
        self._free.append(use.window)
        self._readers[use.asked.secret].windows -= 1
        self._forget_idle(use.asked.secret)

    def _forget_idle(self, secret: bytes) -> None:
        reader = self._readers[secret]
        if not reader.waiting and not reader.windows:
            del self._readers[secret]


def pieces(asked: Wanted, size: int) -> tuple[U64, U64] | None:
    """The offsets and lengths that a request names; None unless they lie in a pool of `size` bytes and fit a window."""
    words = np.frombuffer(asked.table, dtype=np.uint64) if len(asked.table) % 16 == 0 else np.zeros(0, np.uint64)
    offsets, lengths = words.reshape(2, -1)
    if not len(words) or int(lengths.min()) == 0 or int(lengths.max()) > limits.SLICE_BYTES:
        return None
    ends = np.minimum(offsets, np.uint64(size)) + lengths
    fits = int(ends.max()) <= size and int(lengths.sum()) <= limits.SLICE_BYTES
    return (offsets, lengths) if fits else None
