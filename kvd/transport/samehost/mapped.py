"""Pools of a peer, mapped into this process for reading."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable

from kvd.errors import ErrorCode, refusal
from kvd.memory.mapping import Mapping
from kvd.memory.memfd import SEALS
from kvd.net.local.listener import is_scarce
from kvd.net.stream import no_descriptor
from kvd.protocol.export import ExportedPool
from kvd.transport.samehost.copies import Memory

MapPool = Callable[[ExportedPool, int], "MappedPool"]


class MappedPool:
    """A peer's pool in this process; `close` unmaps it."""

    def __init__(self, memory: Memory, close: Callable[[], None]) -> None:
        self.memory = memory
        self.close = close


def map_host_pool(pool: ExportedPool, descriptor: int) -> MappedPool:
    """Maps a pool in host memory, and keeps a descriptor of it; `descriptor` stays the caller's.

    Raises:
        BadRequest: `BAD_POOL`, it is no sealed memfd of that size, so that somebody could take pages off its end; or it
            has holes: files without memory cost their maker nothing, and could take all of our address space.
        Unavailable: `OVERLOADED`, no descriptor is left for it.

    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        status = os.fstat(descriptor)
        present = min(status.st_size, status.st_blocks * 512)
        if seals & SEALS != SEALS or not 0 < pool.size <= pool.length <= present:
            text = f"a pool of {pool.size} bytes, mapped as {pool.length}, came as a file of {status.st_size} bytes, "
            text += f"{present} of them in memory, with seals {seals:#x}, not {SEALS:#x}"
            raise refusal(ErrorCode.BAD_POOL, text)
        mapping = Mapping(descriptor, pool.length, writable=False)
    except OSError as error:
        raise refusal(ErrorCode.BAD_POOL, f"a pool of {pool.size} bytes cannot be mapped: {error}") from error
    try:
        file = _duplicate(descriptor)
    except OSError as error:
        mapping.close()
        raise no_descriptor(error) from error

    def close() -> None:
        mapping.close()
        os.close(file)

    return MappedPool(Memory(mapping.base, pool.size, file=file), close)


def _duplicate(descriptor: int) -> int:
    file = os.dup(descriptor)
    if is_scarce(file):
        os.close(file)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return file
