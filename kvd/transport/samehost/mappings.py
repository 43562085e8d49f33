"""What the loop does not wait for: mappings that are pinned for a GPU, unpinned and unmapped, by threads, in order.

Pinning takes longer than any message may wait, and so does unmapping: where nobody else has the pool any more, its
memory is freed as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import structlog

from kvd.transport.samehost.lent import MappedPool

if TYPE_CHECKING:
    from kvd.protocol.export import ExportedPool
    from kvd.transport.samehost.devices import Devices

_log = structlog.get_logger("kvd.transport")


class Mappings:
    """Of our host pools, once there is a GPU that copies to them, and of peers' pools."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._lengths: dict[int, int] = {}
        """Bytes of the mappings of our host pools, by address."""
        self._gpu = ""
        self._mapped: set[MappedPool] = set()
        """Pools of peers that are in use: others are not pinned any more, however many wait for that."""
        self._own = ThreadPoolExecutor(1, "kvd-pin")
        self._peers = ThreadPoolExecutor(1, "kvd-map")
        """Apart: our workers wait for theirs to be unpinned, and a peer's may take long to pin."""
        for thread in (self._own, self._peers):  # now: a thread that cannot be had later would leave things half done
            thread.submit(bool)
        self._stopping = threading.Lock()
        self._stopped = False

    def add(self, base: int, length: int) -> None:
        """A host pool of ours is registered."""
        self._lengths[base] = length
        self._pin(base)

    def remove(self, base: int) -> Future[None] | None:
        """It ends, and may be unmapped once the result is there; None if it may be now."""
        pinned = self._lengths.pop(base, 0) and self._gpu
        return self._submit(self._own, partial(self._devices.unpin, base)) if pinned else None

    def pin_for(self, gpu: str) -> None:
        """A peer has pools on the GPU with this UUID. The first that is named copies to all of our host pools."""
        if not self._gpu:
            self._gpu = gpu
            for base in self._lengths:
                self._pin(base)

    def _pin(self, base: int) -> None:
        if self._gpu:
            pin = partial(self._devices.pin, self._gpu, base, self._lengths[base])
            self._submit(self._own, partial(self._try_to_pin, pin))

    def map_pool(self, pool: ExportedPool, descriptor: int) -> MappedPool:
        """As `Devices.map_pool`, on any thread; what pins and unmaps the pool is left to one here."""
        mapped = self._devices.map_pool(pool, descriptor)
        self._mapped.add(mapped)
        self._submit(self._peers, partial(self._try_to_pin, partial(self._pin_mapped, mapped)))
        return MappedPool(mapped.memory, partial(self._unmap, mapped))

    def _pin_mapped(self, mapped: MappedPool) -> None:
        if mapped in self._mapped:
            mapped.pin()

    def _unmap(self, mapped: MappedPool) -> None:
        self._mapped.discard(mapped)
        if self._submit(self._peers, partial(_try_to_unmap, mapped)) is None:
            _try_to_unmap(mapped)

    def stop(self) -> None:
        """Pins nothing any more, and waits until everything is unmapped that was closed."""
        with self._stopping:
            self._stopped = True
        for thread in (self._own, self._peers):
            thread.shutdown(wait=True)

    def _submit(self, thread: ThreadPoolExecutor, call: Callable[[], None]) -> Future[None] | None:
        """Has a thread make a call; None if it makes none any more."""
        with self._stopping:
            return None if self._stopped else thread.submit(call)

    def _try_to_pin(self, pin: Callable[[], None]) -> None:
        if self._stopped:
            return
        try:
            pin()
        except Exception as error:  # noqa: BLE001 - nobody waits for it
            _log.error("pinning a pool failed", exc_info=error)


def _try_to_unmap(mapped: MappedPool) -> None:
    try:
        mapped.close()
    except Exception as error:  # noqa: BLE001 - nobody waits for it
        _log.error("a pool of a peer is not unmapped", exc_info=error)
