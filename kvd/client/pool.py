"""A pool as the worker has it: the descriptor, kept for a daemon that was started anew, and the mapped bytes."""

import contextlib
import mmap
import os

from kvd.errors import BadRequest, ErrorCode


class PoolMap:
    """`size` bytes of the file behind `descriptor`, mapped and faulted in; owns the descriptor from now on.

    Raises:
        BadRequest: `BAD_POOL`, it cannot be mapped or is too short; the descriptor is closed.

    """

    def __init__(self, descriptor: int, size: int) -> None:
        length = os.fstat(descriptor).st_size
        if not 0 < size <= length:
            os.close(descriptor)
            raise BadRequest(ErrorCode.BAD_POOL, f"the daemon lent {length} bytes as a pool of {size}")
        try:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            mapped = mmap.mmap(descriptor, length, flags, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            os.close(descriptor)
            raise BadRequest(ErrorCode.BAD_POOL, f"the daemon's pool cannot be mapped: {error}") from error
        self.descriptor = descriptor
        self.view = memoryview(mapped)[:size]

    def is_same(self, descriptor: int) -> bool:
        """Whether `descriptor` leads to the very same memory."""
        return os.path.samestat(os.fstat(self.descriptor), os.fstat(descriptor))

    def close(self) -> None:
        """Closes the descriptor and lets go of the mapping, which lasts as long as views and tensors on it do."""
        if self.descriptor < 0:
            return
        os.close(self.descriptor)
        self.descriptor = -1
        with contextlib.suppress(BufferError):
            self.view.release()
