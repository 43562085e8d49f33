"""Who has which window of a daemon's staging memory, and who is next. Pure: no clock and no I/O.

The next window goes to a reader of the pool whose readers have the fewest, of those to the agent with the fewest, and
among these to the one that waits longest. Pools come first, because agents say themselves who they are: who may read
one pool could otherwise be as many as it takes to keep the readers of all others waiting.

A window that its reader does not give back, because it was killed, is taken back after `limits.WINDOW_SECONDS` if
others wait, and after `limits.WINDOW_SHARE_SECONDS` if a pool waits whose readers have fewer: its reader finds another
tag on the board, and asks again.

A reader has up to `limits.MAX_STAGED_SLICES` requests. With one more its oldest is from before it lost its connection,
and ends.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from kvd import limits
from kvd.transport.slices import U64
from kvd.transport.staged.messages import Finished, Wanted

Key = tuple[bytes, int]
"""A request: the reader's secret, and the number."""

_Name = tuple[bytes, str]
"""A reader: the pool's token, and the agent."""


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
    """What one agent waits for, and how many windows it has."""

    waiting: dict[Key, Wanted] = field(default_factory=dict)
    windows: int = 0


class Windows:
    """`count` windows; those of `wiped` are to be wiped from the board before anything is copied there."""

    def __init__(self, count: int) -> None:
        self._free = list(reversed(range(count)))
        self._uses: dict[Key, Use] = {}
        self._readers: dict[_Name, _Reader] = {}
        self._queued: dict[Key, _Name] = {}
        """Who waits with each request that has no window."""
        # By the pool's token.
        self._waiting: Counter[bytes] = Counter()
        self._taken: Counter[bytes] = Counter()

    @property
    def in_use(self) -> int:
        """How many are taken."""
        return len(self._uses)

    @property
    def waiting(self) -> int:
        """How many requests wait for one."""
        return len(self._queued)

    def ask(self, agent: str, asked: Wanted) -> bool:
        """Queues a request; False if its pool's readers or all together have too many, or this one already.

        One pool's readers leave half of the places to others.
        """
        key, name, most = (asked.secret, asked.number), (asked.token, agent), limits.MAX_STAGED_REQUESTS
        if key in self._uses or key in self._queued:
            return False
        reader = self._readers.get(name) or _Reader()
        if len(self._queued) >= most or self._waiting[asked.token] >= most // 2:
            return False
        self._readers[name] = reader
        reader.waiting[key] = asked
        self._queued[key] = name
        self._waiting[asked.token] += 1
        return True

    def end_oldest(self, agent: str) -> int | None:
        """Ends the oldest request of an agent that is about to have too many. Its window as for `finish`."""
        requests = [key for key, use in self._uses.items() if use.agent == agent and not use.ended]
        for (_, other), reader in self._readers.items():
            requests += reader.waiting if other == agent else ()
        return self.finish(Finished(*requests[0])) if len(requests) >= limits.MAX_STAGED_SLICES else None

    def end_all(self) -> list[int]:
        """Ends all requests: no reader is there any more. The windows that are free now, to be wiped."""
        ended = [self.finish(Finished(*key)) for key in (*self._queued, *self._uses)]
        return [window for window in ended if window is not None]

    def next(self) -> Use | None:
        """Gives a free window to whose turn it is; its use is `copying`."""
        if not self._free or not self._queued:
            return None
        waiting = [
            (self._taken[name[0]], reader.windows, name) for name, reader in self._readers.items() if reader.waiting
        ]
        _, _, name = min(waiting, key=lambda entry: entry[:2])  # the first of these has waited longest
        reader = self._readers.pop(name)
        self._readers[name] = reader
        key = next(iter(reader.waiting))
        asked = self._unqueue(key)
        reader.windows += 1
        self._taken[asked.token] += 1
        use = self._uses[key] = Use(name[1], asked, self._free.pop())
        return use

    def copied(self, use: Use, now: float) -> bool:
        """Its window may be shown to the reader; False if that has ended, and the window is free."""
        use.copying, use.since = False, now
        if use.ended:
            self._release(use)
        return not use.ended

    def finish(self, ended: Finished) -> int | None:
        """The request has ended. Its window if that is free now, to be wiped."""
        key = (ended.secret, ended.number)
        use = self._uses.get(key)
        if use is None:
            if key in self._queued:
                name = self._queued[key]
                self._unqueue(key)
                self._forget_idle(name)
            return None
        use.ended = True
        if use.copying:
            return None
        self._release(use)
        return use.window

    def take_back(self, now: float) -> list[int]:
        """Frees the windows that readers have had for too long, to be wiped."""
        freed = []
        for use in list(self._uses.values()):  # what is freed gives others a larger share
            if not use.copying and self._until(use) <= now:
                self._release(use)
                freed.append(use.window)
        return freed

    def next_late(self) -> float | None:
        """When a window is to be taken back next; None if none is, as nobody waits or has one."""
        if not self._queued:
            return None
        return min((self._until(use) for use in self._uses.values() if not use.copying), default=None)

    def _until(self, use: Use) -> float:
        """How long the reader of a window may have it."""
        own = self._taken[use.asked.token]
        shared = any(self._taken[token] + 1 < own for token in self._waiting)
        return use.since + (limits.WINDOW_SHARE_SECONDS if shared else limits.WINDOW_SECONDS)

    def _unqueue(self, key: Key) -> Wanted:
        asked = self._readers[self._queued.pop(key)].waiting.pop(key)
        self._waiting -= Counter([asked.token])
        return asked

    def _release(self, use: Use) -> None:
        del self._uses[use.asked.secret, use.asked.number]
        self._free.append(use.window)
        name = (use.asked.token, use.agent)
        self._readers[name].windows -= 1
        self._taken -= Counter([use.asked.token])
        self._forget_idle(name)

    def _forget_idle(self, name: _Name) -> None:
        reader = self._readers[name]
        if not reader.waiting and not reader.windows:
            del self._readers[name]


def pieces(asked: Wanted, size: int) -> tuple[U64, U64] | None:
    """The offsets and lengths that a request names; None unless they lie in a pool of `size` bytes and fit a window."""
    words = np.frombuffer(asked.table, dtype=np.uint64) if len(asked.table) % 16 == 0 else np.zeros(0, np.uint64)
    offsets, lengths = words.reshape(2, -1)
    if not len(words) or int(lengths.min()) == 0 or int(lengths.max()) > limits.SLICE_BYTES:
        return None
    ends = np.minimum(offsets, np.uint64(size)) + lengths
    fits = int(ends.max()) <= size and int(lengths.sum()) <= limits.SLICE_BYTES
    return (offsets, lengths) if fits else None
