"""Shared mappings that huge pages can back: aligned to 2 MiB, faulted in whole, and able to tell their pages.

Python's `mmap` chooses the address itself, but a file's huge page is mapped as one only if the address and the offset
in the file agree modulo 2 MiB.
"""

import contextlib
import ctypes
import errno
import mmap
import os
from typing import Final

from kvd import limits

HUGE_PAGE: Final = 2 * limits.MIB
"""Bytes of a huge page; the length of every pool is a multiple."""

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_FIXED_NOREPLACE = 0x100000
_MAP_NORESERVE = 0x4000
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25  # Linux 6.1
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_FAILED = ctypes.c_void_p(-1).value
_ATTEMPTS = 100

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Mapping:
    """`length` bytes of the file behind `descriptor` at `base`, a multiple of 2 MiB; to be written only if `writable`.

    Raises:
        OSError: the file cannot be mapped; `ENOMEM` also if hugetlb pages cannot be reserved.

    """

    def __init__(self, descriptor: int, length: int, *, writable: bool = True) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.base = _map_aligned(descriptor, length, protection)
        self.length = length

    def populate(self) -> None:
        """Faults every page in, writable and with its bytes, so that no later access can run out of memory.

        Raises:
            OSError: there is too little memory.

        """
        self._advise(0, self.length, _MADV_POPULATE_WRITE)

    def collapse(self) -> None:
        """Turns the file's pages into huge ones, whatever the system's default is.

        One small page of each huge one is faulted in first, as the kernel skips what is empty.

        Raises:
            OSError: not every page could become part of a huge one.

        """
        self._advise(0, self.length, mmap.MADV_HUGEPAGE)
        for offset in range(0, self.length, HUGE_PAGE):
            self._advise(offset, mmap.PAGESIZE, _MADV_POPULATE_WRITE)
        self._advise(0, self.length, _MADV_COLLAPSE)

    def page_bytes(self) -> tuple[int, int]:
        """How the kernel maps it now: (bytes of the file's own page, bytes mapped as transparent huge pages)."""
        start = f"{self.base:08x}-"
        found: dict[bytes, int] = {}
        with open("/proc/self/smaps", "rb") as smaps:
            inside = False
            for line in smaps:
                key, *values = line.split()
                if not key.endswith(b":"):
                    if inside:
                        break  # the kernel walks through the page tables of each mapping that is read of
                    inside = key.startswith(start.encode())
                elif inside and len(values) == 2:
                    found[key] = int(values[0]) * limits.KIB
        return found[b"KernelPageSize:"], found[b"ShmemPmdMapped:"]

    def blank(self) -> None:
        """Replaces the file by zeros, which take no memory and stay for good.

        The transport may still read there for a peer, and without a mapping that would be a SIGSEGV of this process.
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        length, self.length = self.length, 0  # if it fails the range may be another thread's: nothing to unmap
        _map(self.base, length, mmap.PROT_READ, flags, -1)

    def close(self) -> None:
        """Unmaps; a second call does nothing."""
        if self.length:
            _unmap(self.base, self.base + self.length)
            self.length = 0

    def _advise(self, offset: int, length: int, advice: int) -> None:
        if _libc.madvise(self.base + offset, length, advice) != 0:
            raise last_error("madvise")


def give_back(descriptor: int, length: int) -> None:
    """Frees the memory of a file's first `length` bytes: those who map them find zeros, and pay for what they write.

    Raises:
        OSError: the file is not in memory, or may not be written to.

    """
    if _libc.fallocate(descriptor, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, 0, length) != 0:
        raise last_error("fallocate")


def _map_aligned(descriptor: int, length: int, protection: int) -> int:
    """Finds room and maps the file there, unless another thread was quicker; then again.

    Not over a reservation: a mapping that fails, for want of hugetlb pages, has already ended the reservation, and
    giving that back would unmap what another thread (`malloc`) has mapped there since.
    """
    for _ in range(_ATTEMPTS):
        room = _map(0, length + HUGE_PAGE, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        _unmap(room, room + length + HUGE_PAGE)
        base = -(-room // HUGE_PAGE) * HUGE_PAGE
        with contextlib.suppress(FileExistsError):
            return _map(base, length, protection, mmap.MAP_SHARED | _MAP_FIXED_NOREPLACE, descriptor)
    raise OSError(errno.EEXIST, f"mmap: other threads took the room for {length} bytes {_ATTEMPTS} times")


def _map(address: int, length: int, protection: int, flags: int, descriptor: int) -> int:
    result: int = _libc.mmap(address or None, length, protection, flags, descriptor, 0)
    if result == _FAILED:
        raise last_error("mmap")
    return result


def _unmap(start: int, end: int) -> None:
    if _libc.munmap(start, end - start) != 0:
        raise last_error("munmap")


def last_error(call: str) -> OSError:
    """What the C library said of this call of its, the thread's last."""
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
