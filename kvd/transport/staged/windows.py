"""Who has which window of a daemon's staging memory, and who is next. Pure: no clock and no I/O.

The next window goes to the agent that has the fewest, and among those to the one that waits longest, so that no reader
keeps others waiting. A window that its reader does not give back, because it was killed, is taken back after
`limits.WINDOW_SECONDS` if others wait: its reader finds another tag on the board, and asks again.

A reader has up to `limits.MAX_STAGED_SLICES` requests. With one more its oldest is from before it lost its connection,
and ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvd import limits
from kvd.transport.slices import U64
from kvd.transport.staged.messages import Finished, Wanted

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
    """What one agent waits for, and how many windows it has."""

    waiting: dict[Key, Wanted] = field(default_factory=dict)
    windows: int = 0


class Windows:
    """`count` windows; those of `wiped` are to be wiped from the board before anything is copied there."""

    def __init__(self, count: int) -> None:
        self._free = list(reversed(range(count)))
        self._uses: dict[Key, Use] = {}
        self._readers: dict[str, _Reader] = {}
        self._waiting = 0

    @property
    def in_use(self) -> int:
        """How many are taken."""
        return len(self._uses)

    @property
    def waiting(self) -> int:
        """How many requests wait for one."""
        return self._waiting

    def ask(self, agent: str, asked: Wanted) -> bool:
        """Queues a request; False if all agents together have too many, or this one already."""
        key = (asked.secret, asked.number)
        reader = self._readers.setdefault(agent, _Reader())
        if self._waiting >= limits.MAX_STAGED_REQUESTS or key in self._uses or key in reader.waiting:
            self._forget_idle(agent)
            return False
        reader.waiting[key] = asked
        self._waiting += 1
        return True

    def end_oldest(self, agent: str) -> int | None:
        """Ends the oldest request of an agent that is about to have too many. Its window as for `finish`."""
        requests = [key for key, use in self._uses.items() if use.agent == agent and not use.ended]
        requests += self._readers[agent].waiting if agent in self._readers else ()
        return self.finish(agent, Finished(*requests[0])) if len(requests) >= limits.MAX_STAGED_SLICES else None

    def end_all(self) -> list[int]:
        """Ends all requests: no reader is there any more. The windows that are free now, to be wiped."""
        waiting = [(agent, key) for agent, reader in self._readers.items() for key in reader.waiting]
        used = [(use.agent, key) for key, use in self._uses.items()]
        ended = [self.finish(agent, Finished(*key)) for agent, key in waiting + used]
        return [window for window in ended if window is not None]

    def next(self) -> Use | None:
        """Gives a free window to whose turn it is; its use is `copying`."""
        if not self._free or not self._waiting:
            return None
        waiting = [(reader.windows, agent) for agent, reader in self._readers.items() if reader.waiting]
        _, agent = min(waiting, key=lambda entry: entry[0])  # the first of these has waited longest
        reader = self._readers.pop(agent)
        self._readers[agent] = reader
        key = next(iter(reader.waiting))
        asked = reader.waiting.pop(key)
        self._waiting -= 1
        reader.windows += 1
        use = self._uses[key] = Use(agent, asked, self._free.pop())
        return use

    def copied(self, use: Use, now: float) -> bool:
        """Its window may be shown to the reader; False if that has ended, and the window is free."""
        use.copying, use.since = False, now
        if use.ended:
            self._release(use)
        return not use.ended

    def finish(self, agent: str, ended: Finished) -> int | None:
        """The request has ended. Its window if that is free now, to be wiped."""
        key = (ended.secret, ended.number)
        use = self._uses.get(key)
        if use is None:
            reader = self._readers.get(agent)
            if reader is not None and reader.waiting.pop(key, None) is not None:
                self._waiting -= 1
                self._forget_idle(agent)
            return None
        use.ended = True
        if use.copying:
            return None
        self._release(use)
        return use.window

    def take_back(self, now: float) -> list[int]:
        """Frees the windows that readers have had for too long, to be wiped."""
        late = [use for use in self._uses.values() if not use.copying and use.since + limits.WINDOW_SECONDS <= now]
        for use in late:
            self._release(use)
        return [use.window for use in late]

    def oldest(self) -> float | None:
        """Since when the reader that has had its window longest has it."""
        return min((use.since for use in self._uses.values() if not use.copying), default=None)

    def _release(self, use: Use) -> None:
        del self._uses[use.asked.secret, use.asked.number]
        self._free.append(use.window)
        self._readers[use.agent].windows -= 1
        self._forget_idle(use.agent)

    def _forget_idle(self, agent: str) -> None:
        reader = self._readers[agent]
        if not reader.waiting and not reader.windows:
            del self._readers[agent]


def pieces(asked: Wanted, size: int) -> tuple[U64, U64] | None:
    """The offsets and lengths that a request names; None unless they lie in a pool of `size` bytes and fit a window."""
    words = np.frombuffer(asked.table, dtype=np.uint64) if len(asked.table) % 16 == 0 else np.zeros(0, np.uint64)
    offsets, lengths = words.reshape(2, -1)
    if not len(words) or int(lengths.min()) == 0 or int(lengths.max()) > limits.SLICE_BYTES:
        return None
    ends = np.minimum(offsets, np.uint64(size)) + lengths
    fits = int(ends.max()) <= size and int(lengths.sum()) <= limits.SLICE_BYTES
    return (offsets, lengths) if fits else None
