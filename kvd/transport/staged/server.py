"""The owner's side of staged reads: copies what peers ask for out of its pools, window by window."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import structlog
from msgspec import Struct

from kvd import limits
from kvd.transport.interface import Region
from kvd.transport.slices import U64
from kvd.transport.staged.arena import Arena, Copy, packed, window_offset
from kvd.transport.staged.messages import Finished, StagedPool, Staging, State, Wanted, tag
from kvd.transport.staged.windows import Use, Windows, pieces

_log = structlog.get_logger("kvd.transport")


class _Pool(Struct, eq=False):
    """A pool; `copies` of it run, and `ended` is called after the last one."""

    region: Region
    token: bytes
    copies: int = 0
    ended: Callable[[], None] | None = None


class Server:
    """Serves pools of the GPU that `copy` copies from, through the windows of `arena`."""

    def __init__(self, arena: Arena, copy: Copy, loop: Any) -> None:
        self._arena = arena
        self._copy = copy
        self._loop = loop
        self._windows = Windows(arena.windows)
        self._lines = arena.windows + limits.STAGED_REFUSALS
        self._refusals = itertools.cycle(range(arena.windows, self._lines))
        """The lines of what is refused, the one that was written longest ago first."""
        self._pools: dict[int, _Pool] = {}
        self._by_token: dict[bytes, _Pool] = {}
        self._alarm: Any = None
        self._alarm_at = 0.0
        self._dropped = False

    def register(self, pool: int, region: Region) -> None:
        """Lets peers read the pool that learn its token."""
        made = self._pools[pool] = _Pool(region, os.urandom(16))
        self._by_token[made.token] = made

    def deregister(self, pool: int, ended: Callable[[], None]) -> bool:
        """Serves the pool no longer, and calls `ended` when nothing copies from it; False if it is not served here."""
        left = self._pools.pop(pool, None)
        if left is None:
            return False
        del self._by_token[left.token]
        left.ended = ended
        self._end_unused(left)
        return True

    def staging(self, pools: tuple[int, ...] | None = None) -> Staging:
        """What peers need for these pools, or for all."""
        chosen = [pool for number, pool in self._pools.items() if pools is None or number in pools]
        known = {pool.region.base: StagedPool(pool.token, pool.region.size) for pool in chosen}
        return Staging(self._arena.base, self._lines, known)

    def hear(self, agent: str, message: Wanted | Finished) -> None:
        """A peer wants a slice, or has read one."""
        if isinstance(message, Wanted):
            if self._find(message) is None:  # a window for it would be one less for those that may read
                self._arena.write_line(next(self._refusals), _tag(message, State.REFUSED))
            else:
                self._wipe(self._windows.end_oldest(agent))
                if not self._windows.ask(agent, message) and not self._dropped:
                    self._dropped = True
                    _log.warning("requests for staged slices are dropped", agent=agent, waiting=self._windows.waiting)
        else:
            self._wipe(self._windows.finish(message))
        self._serve()

    def network_down(self) -> None:
        """Nobody reads the windows any more: the process is gone that served them."""
        for window in self._windows.end_all():
            self._wipe(window)

    def _wipe(self, window: int | None) -> None:
        if window is not None:
            self._arena.write_line(window, b"")

    def _serve(self) -> None:
        while (use := self._windows.next()) is not None:
            self._begin(use)
        late = self._windows.next_late()
        if late is None or (self._alarm is not None and self._alarm_at <= late):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = late
        self._alarm = self._loop.call_later(max(0.0, late - self._loop.time()), self._take_back)

    def _take_back(self) -> None:
        self._alarm = None
        if self._windows.waiting:
            for window in self._windows.take_back(self._loop.time()):
                self._wipe(window)
            self._serve()

    def _find(self, asked: Wanted) -> tuple[_Pool, tuple[U64, U64]] | None:
        """The pool, offsets and lengths that a request names; None if it names none that is read here."""
        pool = self._by_token.get(asked.token)
        wanted = pieces(asked, pool.region.size) if pool else None
        return None if pool is None or wanted is None else (pool, wanted)

    def _begin(self, use: Use) -> None:
        found = self._find(use.asked)
        if found is None:  # it was there when it was asked for
            self._end(use, State.REFUSED)
            return
        pool, (offsets, lengths) = found
        targets = packed(self._arena.base + window_offset(use.window), lengths)
        pool.copies += 1
        self._copy(targets, offsets + np.uint64(pool.region.base), lengths, partial(self._copied, use, pool))

    def _copied(self, use: Use, pool: _Pool, failure: str) -> None:
        pool.copies -= 1
        self._end_unused(pool)
        if failure:
            _log.warning("a slice cannot be staged", agent=use.agent, reason=failure)
        self._end(use, State.FAILED if failure else State.READY)
        self._serve()

    def _end(self, use: Use, state: State) -> None:
        """The line says so, once all bytes are there."""
        if self._windows.copied(use, self._loop.time()):
            self._arena.write_line(use.window, _tag(use.asked, state))

    def _end_unused(self, pool: _Pool) -> None:
        if pool.ended is not None and not pool.copies:
            ended, pool.ended = pool.ended, None
            ended()


def _tag(asked: Wanted, state: State) -> bytes:
    return tag(asked.secret, asked.number, state)
