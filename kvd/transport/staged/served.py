"""Our pools on a GPU: each has an arena of its own, and is served from when that is registered until it is not.

What the network registers under a pool's number is the pool's arena. So whoever is told of a pool is told of its arena,
and of no other's; and a pool that is registered anew gets another arena, under another token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import Struct

from kvd import limits, units
from kvd.errors import KvdError
from kvd.transport.interface import Event, Network, Region, RegisterFailed
from kvd.transport.staged.arena import Arena, Copy, Device, HostMemory
from kvd.transport.staged.messages import Finished, StagedPool, Wanted
from kvd.transport.staged.server import Server


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
