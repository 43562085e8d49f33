"""Shared mappings that huge pages can back: aligned to 2 MiB, faulted in whole, and able to say what they lie on.

Python's `mmap` chooses the address itself, and a file's huge page can only be mapped as one where the address and the
offset in the file agree modulo 2 MiB.
"""

import contextlib
import ctypes
import errno
import mmap
import os
from typing import Final

from kvd import limits

HUGE_PAGE: Final = 2 * limits.MIB
"""Bytes of a huge page; every pool is whole ones, so that all of it can lie on them."""

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
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Mapping:
    """`length` bytes of the file behind `descriptor`, readable and writable at `base`, a multiple of 2 MiB.

    Raises:
        OSError: the file cannot be mapped; `ENOMEM` also where hugetlb pages cannot be reserved.

    """

    def __init__(self, descriptor: int, length: int) -> None:
        self.base = _map_aligned(descriptor, length)
        self.length = length

    def populate(self) -> None:
        """Faults every page in, writable and with its bytes as they are; no later access can fail for want of memory.

        Raises:
            OSError: there is not that much memory.

        """
        self._advise(0, self.length, _MADV_POPULATE_WRITE)

    def collapse(self) -> None:
        """Asks for the file's pages to be huge ones, whether or not the system hands them out unasked.

        One small page of each huge one is faulted in before: the kernel makes a huge page of what is there, zeroes
        the rest, and passes over what is empty.

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
                    inside = key.startswith(start.encode())
                elif inside and len(values) == 2:
                    found[key] = int(values[0]) * limits.KIB
        return found[b"KernelPageSize:"], found[b"ShmemPmdMapped:"]

    def blank(self) -> None:
        """Puts zeros, which take no memory, in the place of the file. They stay for good.

        Somebody may still read there, through a transport that reads for whoever asks: where nothing is mapped that
        would be a SIGSEGV of this process.
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        length, self.length = self.length, 0  # where it fails the place may be another thread's: nothing to unmap
        _map(self.base, length, mmap.PROT_READ, flags, -1)

    def close(self) -> None:
        """Unmaps; a second call does nothing."""
        if self.length:
            _unmap(self.base, self.base + self.length)
            self.length = 0

    def _advise(self, offset: int, length: int, advice: int) -> None:
        if _libc.madvise(self.base + offset, length, advice) != 0:
            raise _last_error("madvise")


def give_back(descriptor: int, length: int) -> None:
    """Gives the memory of a file's first `length` bytes back to the system: whoever has them mapped finds zeros there.

    What such a process writes to them after that is memory of its own cgroup.

    Raises:
        OSError: the file is none of memory, or may not be written to.

    """
    if _libc.fallocate(descriptor, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, 0, length) != 0:
        raise _last_error("fallocate")


def _map_aligned(descriptor: int, length: int) -> int:
    """Finds room and maps the file there, where other threads have not been quicker.

    Never over a reservation: a mapping of a file that fails, as that of hugetlb pages which the system does not have,
    has ended what was there before, and whoever then gives the reservation back takes what another thread, a `malloc`
    for one, has mapped there since.
    """
    for _ in range(_ATTEMPTS):
        room = _map(0, length + HUGE_PAGE, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        _unmap(room, room + length + HUGE_PAGE)
        base = -(-room // HUGE_PAGE) * HUGE_PAGE
        with contextlib.suppress(FileExistsError):
            return _map(
                base, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED_NOREPLACE, descriptor
            )
    raise OSError(errno.EEXIST, f"mmap: other threads took every one of {_ATTEMPTS} places for {length} bytes")


def _map(address: int, length: int, protection: int, flags: int, descriptor: int) -> int:
    result: int = _libc.mmap(address or None, length, protection, flags, descriptor, 0)
    if result == _FAILED:
        raise _last_error("mmap")
    return result


def _unmap(start: int, end: int) -> None:
    if _libc.munmap(start, end - start) != 0:
        raise _last_error("munmap")


def _last_error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
