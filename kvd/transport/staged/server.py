"""The owner's side of staged reads: our pools on a GPU, each with an arena, and what peers ask for, window by window.

What the network registers under a pool's number is the pool's arena. So whoever is told of a pool is told of its arena,
and of no other's; and a pool that is registered anew gets another arena, under another token.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import structlog
from msgspec import Struct

from kvd import limits, units
from kvd.errors import KvdError
from kvd.transport.interface import Event, Network, Region, RegisterFailed
from kvd.transport.slices import U64
from kvd.transport.staged.arena import Arena, Copy, Device, HostMemory, packed, window_offset
from kvd.transport.staged.messages import Finished, StagedPool, State, Wanted, heading, tag
from kvd.transport.staged.windows import Use, Windows, pieces

_log = structlog.get_logger("kvd.transport")

_FIRST_WINDOW: Final = 1
"""The line of the first window, behind the heading."""


class Server:
    """Serves the pool at `region`, which is on the GPU that `copy` copies from, through the windows of `arena`."""

    def __init__(self, region: Region, arena: Arena, copy: Copy, loop: Any) -> None:
        self._region = region
        self._arena = arena
        self._copy = copy
        self._loop = loop
        self._windows = Windows(arena.windows)
        refusals = _FIRST_WINDOW + arena.windows
        lines = refusals + limits.STAGED_REFUSALS
        self._refusals = itertools.cycle(range(refusals, lines))
        """The lines of what is refused, the one that was written longest ago first."""
        self.staged = StagedPool(os.urandom(16), region.size, arena.base, lines)
        """What peers need that may read it."""
        arena.write_line(0, heading(self.staged.token))
        self._copies = 0
        """How many run."""
        self._ended: Callable[[], None] | None = None
        self._alarm: Any = None
        self._alarm_at = 0.0
        self._dropped = False

    def close(self, ended: Callable[[], None]) -> None:
        """Begins no copy any more, and calls `ended` when none runs."""
        self._ended = ended
        self._windows.end_all()
        if not self._copies:
            ended()

    def hear(self, agent: str, message: Wanted | Finished) -> None:
        """A peer wants a slice of this pool, or has read one."""
        if isinstance(message, Finished):
            self._wipe(self._windows.finish((message.secret, message.number)))
        elif pieces(message, self._region.size) is None:  # a window for it would be one less for those that may read
            self._arena.write_line(next(self._refusals), _tag(message, State.REFUSED))
        else:
            self._wipe(self._windows.end_oldest(message.secret))
            if not self._windows.ask(agent, message) and not self._dropped:
                self._dropped = True
                _log.warning("requests for staged slices are dropped", agent=agent, waiting=self._windows.waiting)
        self._serve()

    def network_down(self) -> None:
        """Nobody reads the windows any more: the process is gone that served them."""
        for window in self._windows.end_all():
            self._wipe(window)

    def _wipe(self, window: int | None) -> None:
        if window is not None:
            self._write(window, b"")

    def _write(self, window: int, text: bytes) -> None:
        self._arena.write_line(_FIRST_WINDOW + window, text)

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

    def _begin(self, use: Use) -> None:
        wanted: tuple[U64, U64] | None = pieces(use.asked, self._region.size)
        assert wanted is not None  # noqa: S101 - it was looked at when it was asked for
        offsets, lengths = wanted
        targets = packed(self._arena.base + window_offset(use.window), lengths)
        self._copies += 1
        self._copy(targets, offsets + np.uint64(self._region.base), lengths, partial(self._copied, use))

    def _copied(self, use: Use, failure: str) -> None:
        self._copies -= 1
        if failure:
            _log.warning("a slice cannot be staged", agent=use.agent, reason=failure)
        if self._windows.copied(use, self._loop.time()):  # all bytes are there, and the line says so
            self._write(use.window, _tag(use.asked, State.FAILED if failure else State.READY))
        if self._ended is None:
            self._serve()
        elif not self._copies:
            self._ended()


def _tag(asked: Wanted, state: State) -> bytes:
    return tag(asked.secret, asked.number, state)


class _Pool(Struct, eq=False):
    """A pool with its share of the windows. It has an arena once that is made, and a server while it may be read.

    One that `returns` keeps its share, and gets another arena.
    """

    region: Region
    windows: int
    arena: Arena | None = None
    server: Server | None = None
    returns: bool = False


class ServedPools:
    """The pools on `device`, whose arenas `network` registers; `emit` takes what could not be registered."""

    def __init__(
        self, network: Network, device: Device, copy: Copy, loop: Any, *, emit: Callable[[Event], None]
    ) -> None:
        self._network = network
        self._device = device
        self._copy = copy
        self._loop = loop
        self._emit = emit
        self._pools: dict[int, _Pool] = {}
        self._by_token: dict[bytes, Server] = {}

    def register(self, number: int, region: Region) -> None:
        """Makes an arena and has it registered; answered by the network, or by `RegisterFailed`."""
        left = limits.STAGING_WINDOWS - sum(pool.windows for pool in self._pools.values())
        if number in self._pools:
            windows = self._pools[number].windows
        elif left:
            windows = max(1, left // limits.STAGING_SHARE)
        else:
            self._emit(RegisterFailed(number, _no_windows(len(self._pools))))
            return
        pool = self._pools[number] = _Pool(region, windows)
        self._device.allocate(Arena.size(windows), partial(self._allocated, number, pool))

    def _allocated(self, number: int, pool: _Pool, memory: HostMemory | KvdError) -> None:
        if isinstance(memory, KvdError):
            del self._pools[number]
            self._emit(RegisterFailed(number, f"its windows: {memory.text}"))
        else:
            pool.arena = Arena(memory, pool.windows)
            self._network.register(number, memory.region)

    def registered(self, number: int) -> None:
        """The network has registered an arena: serves its pool, if it is ours."""
        pool = self._pools.get(number)
        if pool is not None and pool.arena is not None:
            pool.server = Server(pool.region, pool.arena, self._copy, self._loop)
            self._by_token[pool.server.staged.token] = pool.server

    def deregister(self, number: int, *, returns: bool) -> bool:
        """Serves a pool no longer, has its arena deregistered once nothing copies there; False if it is not ours."""
        pool = self._pools.get(number)
        if pool is None or pool.server is None:
            return False
        del self._by_token[pool.server.staged.token]
        pool.server.close(partial(self._network.deregister, number))
        pool.server, pool.returns = None, returns
        return True

    def ended(self, number: int) -> None:
        """The network has not registered an arena, or no longer: gives it back if it is ours."""
        pool = self._pools.get(number)
        if pool is None:
            return
        if pool.arena is not None:
            self._device.free(pool.arena.memory)
            pool.arena = None
        if not pool.returns:
            del self._pools[number]

    def size_at(self, base: int) -> int | None:
        """Bytes of the pool at an address; None if there is none."""
        pools = (pool.region for pool in self._pools.values() if pool.server is not None)
        return next((region.size for region in pools if region.base == base), None)

    def staged(self, numbers: tuple[int, ...] | None = None) -> dict[int, StagedPool]:
        """What peers need that may read these pools, or all, by the pools' addresses."""
        return {
            pool.region.base: pool.server.staged
            for number, pool in self._pools.items()
            if pool.server is not None and (numbers is None or number in numbers)
        }

    def hear(self, agent: str, message: Wanted | Finished) -> None:
        """A peer wants a slice, or has read one; of a pool that is gone it finds no board."""
        server = self._by_token.get(message.token)
        if server is not None:
            server.hear(agent, message)

    def network_down(self) -> None:
        """The process is gone that served the windows."""
        for server in self._by_token.values():
            server.network_down()


def _no_windows(pools: int) -> str:
    size = units.size(limits.STAGING_WINDOWS * limits.SLICE_BYTES)
    text = f"other hosts read it by windows of host memory, and {pools} pools have all {limits.STAGING_WINDOWS} of them"
    return f"{text} ({size}); end one of these"
