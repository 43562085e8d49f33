"""Copies out of host memory that a peer lends, by the kernel: no signal comes where the peer takes pages away.

Large pieces are read from the pool's file (`pread`): the kernel copies a page of the file at a time, however large it
is, and where pages were taken away it finds zeros and makes no new ones. Small pieces are copied out of the mapping
(`process_vm_readv`), hundreds a call and 4 KiB at a time. That would make new pages, which the kernel charges to us: it
is not done once the file lacks some.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Final

import numpy as np

from kvd import limits
from kvd.transport.samehost.copies import Memory
from kvd.transport.samehost.process_memory import copy
from kvd.transport.slices import U64

LARGE: Final = 256 * limits.KIB
"""Bytes of a piece from which a call for it alone costs less than its pages do (`python -m benchmarks.copies`)."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.pread.restype = ctypes.c_ssize_t
_libc.pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)


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
        _read(lent.file, to, size, at)


def _read(file: int, target: int, size: int, offset: int) -> None:
    done = _libc.pread(file, target, size, offset)
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"pread: {os.strerror(number)}")
    if done != size:
        raise OSError(errno.EFAULT, f"pread: {done} of {size} bytes could be copied")
