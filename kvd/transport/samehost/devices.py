"""The devices that pools are on, who copies between them (the kernel between host memory, else a GPU), their mappings.

Mappings are pinned for a GPU, unpinned and unmapped by threads, in order. Pinning takes longer than any message may
wait, and so does unmapping: where nobody else has the pool any more, its memory is freed as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from kvd import limits
from kvd.transport.samehost.copies import Copy, Memory
from kvd.transport.samehost.lent import MappedPool, copy_lent, map_host_pool
from kvd.transport.slices import SliceBounds

if TYPE_CHECKING:
    from kvd.plan import Descriptors
    from kvd.protocol.export import ExportedPool
    from kvd.transport.samehost.gpu import Gpu, SmallCopies

_log = structlog.get_logger("kvd.transport")

GPU_SLICES: Final = SliceBounds(limits.GPU_SLICE_BYTES, limits.GPU_SLICE_DESCRIPTORS)
_GPU_PEER_SLICES: Final = SliceBounds(limits.GPU_PEER_SLICE_BYTES, limits.GPU_SLICE_DESCRIPTORS)


class Devices:
    """`own` is the UUID of the GPU that our pools are on; empty for host memory. Any thread may use it."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._gpus: dict[str, Gpu] = {}
        """Those that copy, by UUID."""
        self._lock = threading.Lock()

    def map_pool(self, pool: ExportedPool, descriptor: int) -> MappedPool:
        """Maps a peer's pool for the GPU of our pools, or else for that of the peer's.

        The descriptor stays the caller's.

        Raises:
            KvdError: it cannot be mapped.

        """
        gpu = self._gpu(self._own or pool.device)
        return gpu.map_pool(pool, descriptor) if gpu else map_host_pool(pool, descriptor)

    def copy_between(self, source: Memory, target: Memory, descriptors: Descriptors) -> tuple[Copy, SliceBounds | None]:
        """What copies from a mapped pool to one of ours, and the bounds of its slices, None for the usual ones."""
        gpu = self._gpu(target.device or source.device)
        if gpu is None:
            return partial(copy_lent, source), None
        if source.device and target.device and gpu.launches(descriptors):
            return gpu.copy_within, GPU_SLICES if source.device == target.device else _GPU_PEER_SLICES
        return gpu.copy, None

    def small_copies(self, source: Memory, target: Memory, descriptors: Descriptors) -> SmallCopies | None:
        """What launches these copies, if all are within GPUs; `copy_between` has the others."""
        gpu = self._gpu(target.device) if source.device else None
        some = descriptors.count and descriptors.length.all()
        return gpu.small_copies if gpu and some and gpu.launches(descriptors) else None

    def pin(self, identity: str, address: int, length: int) -> None:
        """Lets GPUs copy to a host pool of ours by themselves, if the driver lets us; otherwise it copies twice."""
        gpu = self._gpu(identity)
        if gpu is not None:
            gpu.try_to_pin(address, length, "a pool cannot be pinned: copies of a GPU into it are slower")

    def unpin(self, identity: str, address: int) -> None:
        """Ends `pin`, before the pool is unmapped."""
        if identity in self._gpus:
            self._gpus[identity].unpin(address)

    def close(self) -> None:
        """Ends the streams, once nobody copies."""
        for gpu in self._gpus.values():
            gpu.close()

    def _gpu(self, identity: str) -> Gpu | None:
        if not identity:
            return None
        with self._lock:
            if identity not in self._gpus:
                from kvd.transport.samehost.gpu import Gpu  # noqa: PLC0415 - nothing of CUDA is loaded without a GPU

                self._gpus[identity] = Gpu(identity)
            return self._gpus[identity]


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
        return self._submit(self._own, partial(self._devices.unpin, self._gpu, base)) if pinned else None

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
        unmap = partial(_attempt, mapped.close, "a pool of a peer is not unmapped")
        if self._submit(self._peers, unmap) is None:
            unmap()

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
        if not self._stopped:
            _attempt(pin, "pinning a pool failed")


def _attempt(call: Callable[[], None], failed: str) -> None:
    """Makes a call that nobody waits for; the log has what it raised, as `failed`."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is
        _log.error(failed, exc_info=error)
