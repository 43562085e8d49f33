"""The worker's side of a pool: the mapped bytes, and the descriptor, kept for a restarted daemon."""

import contextlib
import mmap
import os
from typing import TYPE_CHECKING, Union

from kvd.errors import ErrorCode, refusal
from kvd.protocol.worker import Attached

if TYPE_CHECKING:
    from kvd.client.pool.cuda import DevicePool

Pool = Union["PoolMap", "DevicePool"]


def map_pool(descriptor: int, attached: Attached) -> Pool:
    """The pool that the daemon lent, in host memory or a GPU's; owns the descriptor from now on.

    Raises:
        BadRequest: `BAD_POOL`, it cannot be mapped; the descriptor is closed.
        Unavailable: `NO_DEVICE`, this process does not see the pool's GPU, or has no driver; so is it.

    """
    if not attached.device:
        return PoolMap(descriptor, attached.pool_bytes)
    from kvd.client.pool.cuda import DevicePool  # noqa: PLC0415 - workers without a GPU load nothing of CUDA

    return DevicePool(descriptor, attached.device, attached.pool_bytes, attached.pool_length)


class PoolMap:
    """`size` bytes of the file behind `descriptor`, mapped and faulted in; owns the descriptor from now on.

    Raises:
        BadRequest: `BAD_POOL`, the file cannot be mapped or is too short; the descriptor is closed.

    """

    def __init__(self, descriptor: int, size: int) -> None:
        length = os.fstat(descriptor).st_size
        if not 0 < size <= length:
            os.close(descriptor)
            raise refusal(ErrorCode.BAD_POOL, f"the daemon lent {length} bytes as a pool of {size}")
        try:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            mapped = mmap.mmap(descriptor, length, flags, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            os.close(descriptor)
            raise refusal(ErrorCode.BAD_POOL, f"the daemon's pool cannot be mapped: {error}") from error
        self.descriptor = descriptor
        self.view = memoryview(mapped)[:size]

    def is_same(self, descriptor: int) -> bool:
        """Whether `descriptor` is of the same memory."""
        return os.path.samestat(os.fstat(self.descriptor), os.fstat(descriptor))

    def close(self) -> None:
        """Closes the descriptor and releases the mapping, which lasts until views and tensors on it are gone."""
        if self.descriptor < 0:
            return
        os.close(self.descriptor)
        self.descriptor = -1
        with contextlib.suppress(BufferError):
            self.view.release()
