"""The ways in which one process may copy out of memory that another one lends it."""

import ctypes
import errno
import os
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

import numpy as np

from kvd.memory.mapping import Mapping
from kvd.transport.samehost.process_memory import copy
from kvd.transport.slices import U64

Way: TypeAlias = Callable[[int, Mapping, U64, U64, U64], None]
"""Copies `length[i]` bytes at offset `source[i]` of a file, given as a descriptor and as a mapping of it, to address
`target[i]`; as few calls as it takes, and none of them with the interpreter's lock."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
_libc.pread.restype = ctypes.c_ssize_t


def process_vm_readv(_file: int, mapping: Mapping, target: U64, source: U64, length: U64) -> None:
    """By the kernel, many pieces a call, page by page."""
    for first in range(0, len(length), 512):
        part = slice(first, first + 512)
        copy(target[part], source[part] + np.uint64(mapping.base), length[part])


def memcpy(_file: int, mapping: Mapping, target: U64, source: U64, length: U64) -> None:
    """By this process, out of the mapping, a piece a call."""
    for there, here, size in _rows(source + np.uint64(mapping.base), target, length):
        ctypes.memmove(here, there, size)


def pread(file: int, _mapping: Mapping, target: U64, source: U64, length: U64) -> None:
    """By the kernel, out of the file, a piece a call; a page of the file at a time, however large it is."""
    for there, here, size in _rows(source, target, length):
        if _libc.pread(file, here, size, there) != size:
            number = ctypes.get_errno() or errno.EFAULT
            raise OSError(number, f"pread: {os.strerror(number)}")


def _rows(source: U64, target: U64, length: U64) -> Iterable[tuple[int, int, int]]:
    return zip(source.tolist(), target.tolist(), length.tolist(), strict=True)


WAYS: Final[dict[str, Way]] = {way.__name__: way for way in (process_vm_readv, memcpy, pread)}
