"""The one pool that a worker is lent, again by each run of its daemon: its mapped bytes, and the descriptor."""

import contextlib
import mmap
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Union

from kvd.client.connection import Connection
from kvd.errors import ErrorCode, KvdError, refusal
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


Map = Callable[[int, Attached], Pool]
"""Maps the pool of a descriptor, which it takes over."""


class Loan:
    """A pool of `pool_bytes`, of daemons that listen at `path`."""

    def __init__(self, path: str, pool_bytes: int, connection: Connection, map_pool: Map) -> None:
        self.pool: Pool | None = None
        self.incarnation = 0
        """The run of the daemon that this worker was attached to last; 0 if it never was."""
        self._path = path
        self._pool_bytes = pool_bytes
        self._connection = connection
        self._map = map_pool

    def take(self, attached: Attached, descriptor: int) -> bool:
        """Maps the pool, or closes another descriptor of the one that is mapped.

        Returns whether another run lent it before, whose process has ended then.

        Raises:
            BadRequest: `BAD_POOL`, it is not the pool that was asked for, or not the one that was lent before.
            Unavailable: `DAEMON_LOST`, the daemon that lent it before may still write to it.

        """
        is_other = self.incarnation not in (0, attached.incarnation)
        try:
            self._check(attached, descriptor, is_other=is_other)
        except KvdError:
            self._connection.discard(descriptor)
            raise
        if self.pool is None:
            self.pool = self._map(descriptor, attached)
        else:
            self._connection.discard(descriptor)
        return is_other

    def _check(self, attached: Attached, descriptor: int, *, is_other: bool) -> None:
        if attached.pool_bytes != self._pool_bytes:
            text = f"asked for a pool of {self._pool_bytes} bytes, the daemon lent {attached.pool_bytes}"
            raise refusal(ErrorCode.BAD_POOL, text)
        if self.pool is None:
            return
        if is_other and not self._connection.daemon_exited():
            text = f"another daemon answers at {self._path}, but the process of the one before may still write"
            raise refusal(ErrorCode.DAEMON_LOST, text)
        if not self.pool.is_same(descriptor):
            text = "the daemon lent another pool than before, and the engine's tensors use that one; restart the worker"
            raise refusal(ErrorCode.BAD_POOL, text)
