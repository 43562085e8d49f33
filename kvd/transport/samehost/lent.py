"""Host memory that a peer lends: mapped for reading, and copied from by the kernel.

So no signal comes where the peer takes pages away. Large pieces are read from the pool's file (`pread`): the kernel
copies a page of the file at a time, however large it is, and where pages were taken away it finds zeros and makes no
new ones. Small pieces are copied out of the mapping (`process_vm_readv`), hundreds a call and 4 KiB at a time. That
would make new pages, which the kernel charges to us: it is not done once the file lacks some.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable
from typing import Final

import numpy as np

from kvd import limits
from kvd.errors import ErrorCode, refusal
from kvd.memory.mapping import Mapping
from kvd.memory.memfd import SEALS
from kvd.net.local.listener import is_scarce
from kvd.net.stream import no_descriptor
from kvd.protocol.export import ExportedPool
from kvd.transport.samehost.copies import Memory
from kvd.transport.samehost.process_memory import check_copied, copy
from kvd.transport.slices import U64

MapPool = Callable[[ExportedPool, int], "MappedPool"]

LARGE: Final = 512 * limits.KIB
"""Bytes of a piece from which a call for it alone costs less than its pages do. A long read of scattered 256 KiB takes
1 ms more by such calls (`kvd bench`); where slices of 4 MiB cut 4.75 MiB a layer, pieces between this and 1 MiB cost a
pull of 76 MiB 0.3 ms of 6 when they were copied out of the mapping (its last row)."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.pread.restype = ctypes.c_ssize_t
_libc.pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)


def _nothing() -> None:
    """Host memory that only the kernel copies needs no pinning, nor does a GPU's."""


class MappedPool:
    """A peer's pool in this process; `pin` makes copies of it faster, `close` unmaps it."""

    def __init__(self, memory: Memory, close: Callable[[], None], pin: Callable[[], None] = _nothing) -> None:
        self.memory = memory
        self.close = close
        self.pin = pin


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


def copy_lent(lent: Memory, target: U64, source: U64, length: U64) -> None:
    """Copies `length[i]` bytes from address `source[i]`, of `lent`, to `target[i]`; at most 1024 pieces.

    Raises:
        OSError: not all of it could be read, or written.

    """
    small = length < LARGE
    if small.any() and lent.is_whole:
        copy(target[small], source[small], length[small])
        target, source, length = target[~small], source[~small], length[~small]
    offset = source - np.uint64(lent.address)
    for to, at, size in zip(target.tolist(), offset.tolist(), length.tolist(), strict=True):
        check_copied("pread", _libc.pread(lent.file, to, size, at), size)
