"""The one pool that a worker is lent, again by each run of its daemon."""

from collections.abc import Callable

from kvd.client.connection import Connection
from kvd.client.pool import Pool
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.protocol.worker import Attached

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
