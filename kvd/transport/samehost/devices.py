"""The devices that pools are on, and who copies between them: the kernel between host memory, else a GPU."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from kvd import limits
from kvd.errors import Unavailable
from kvd.transport.samehost.copies import Copy, Memory
from kvd.transport.samehost.lent import copy_lent, map_host_pool
from kvd.transport.slices import SliceBounds

if TYPE_CHECKING:
    from kvd.plan import Descriptors
    from kvd.protocol.export import ExportedPool
    from kvd.transport.samehost.gpu import Gpu, SmallCopies
    from kvd.transport.samehost.lent import MappedPool

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
        self._pinned: dict[int, Gpu] = {}
        """Who pinned which of our host pools, by address; one thread alone pins and unpins."""

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
        if gpu is None or address in self._pinned:
            return
        try:
            gpu.pin(address, length)
        except Unavailable as error:
            _log.warning("a pool cannot be pinned: copies of a GPU into it are slower", reason=error.text)
        else:
            self._pinned[address] = gpu

    def unpin(self, address: int) -> None:
        """Ends `pin`, before the pool is unmapped."""
        gpu = self._pinned.pop(address, None)
        if gpu is not None:
            gpu.unpin(address)

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
