"""Memory of the simulated world: files of bytes, descriptors that processes hold, and the daemon's provider of pools.

Each file carries a mask of the bytes that a transport may write just now: a worker opens it for the blocks of a pull,
and closes it when it is told that they are free. Every write is held against it.
"""

import os
import stat
from collections.abc import Callable, Container
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvd.errors import BadRequest, ErrorCode, NoMemory


class File:
    """A memfd: `data` uint8 [size], `writable` bool [size]."""

    def __init__(self, number: int, size: int, *, sealed: bool = True) -> None:
        self.number = number
        self.size = size
        self.sealed = sealed
        self.ended = False
        """Its bytes have been given back."""
        self.pid = 0
        """The process that it stands for, if it is a pidfd."""
        self.data: NDArray[np.uint8] = np.zeros(size, np.uint8)
        self.writable: NDArray[np.bool_] = np.zeros(size, np.bool_)


class Kernel:
    """Who holds which descriptor."""

    def __init__(self) -> None:
        self._files: dict[int, tuple[str, File]] = {}
        self._last = 2
        self._last_file = 0

    def create(self, owner: str, size: int, *, sealed: bool = True) -> int:
        """A new file; its descriptor."""
        self._last_file += 1
        return self.open(owner, File(self._last_file, size, sealed=sealed))

    def open(self, owner: str, file: File) -> int:
        """Another descriptor of `file`, for `owner`."""
        self._last += 1
        self._files[self._last] = (owner, file)
        return self._last

    def file(self, descriptor: int) -> File:
        """What a descriptor stands for."""
        return self._files[descriptor][1]

    def dup(self, descriptor: int, /) -> int:
        """Another descriptor of the same file, for the same owner."""
        return self.open(*self._files[descriptor])

    def fstat(self, descriptor: int, /) -> os.stat_result:
        """Tells files apart."""
        return os.stat_result((stat.S_IFREG, self.file(descriptor).number, 0, 1, 0, 0, 0, 0, 0, 0))

    def close(self, descriptor: int) -> None:
        """Closes a descriptor; raises if it is closed twice."""
        del self._files[descriptor]

    def close_all(self, owner: str) -> None:
        self._files = {number: entry for number, entry in self._files.items() if entry[0] != owner}

    def held_by(self, owner: str) -> list[int]:
        return [number for number, (holder, _) in self._files.items() if holder == owner]


class SimPidfds:
    """Descriptors that stand for processes; implements `kvd.daemon.systemd.Processes` for the process `owner`."""

    def __init__(self, kernel: Kernel, owner: str, alive: Container[int]) -> None:
        self._kernel = kernel
        self._owner = owner
        self._alive = alive

    def open(self, pid: int) -> int:
        """A pidfd."""
        if pid not in self._alive:
            return -1
        descriptor = self._kernel.create(self._owner, 0)
        self._kernel.file(descriptor).pid = pid
        return descriptor

    def number(self, descriptor: int) -> int:
        """The process, 0 once it has ended."""
        pid = self._kernel.file(descriptor).pid
        return pid if pid in self._alive else 0


class SimStamps:
    """So few words that they run out at times; implements `kvd.memory.stamps.StampMemory`."""

    def __init__(self, map_bytes: Callable[[NDArray[np.uint8]], int]) -> None:
        self.words: NDArray[np.uint64] = np.zeros((4, 2), np.uint64)
        self.base = map_bytes(self.words.view(np.uint8).reshape(-1))


@dataclass(slots=True)
class SimMemory:
    """One mapped pool; implements `kvd.memory.interface.Memory`."""

    provider: "SimProvider"
    base: int
    size: int
    descriptor: int
    backing: str = "plain"
    device: str = ""

    @property
    def length(self) -> int:
        """Bytes of the mapping."""
        return self.size

    def move(self) -> None:
        """Maps the file somewhere else."""
        base = self.provider.map(self.descriptor)
        self.provider.unmap(self.base)
        self.base = base

    def close(self) -> None:
        self.provider.unmap(self.base)
        self.provider.kernel.close(self.descriptor)

    def free(self) -> None:
        file = self.provider.kernel.file(self.descriptor)
        file.data[:], file.ended = 0, True
        self.close()


class SimProvider:
    """One daemon's provider of pools; implements `kvd.memory.interface.MemoryProvider`."""

    device = ""

    def __init__(
        self,
        kernel: Kernel,
        owner: str,
        *,
        map_file: Callable[[File], int],
        unmap: Callable[[int], None],
        is_full: Callable[[], bool],
    ) -> None:
        self.kernel = kernel
        self.owner = owner
        self.unmap = unmap
        self._map_file = map_file
        self._is_full = is_full

    def footprint(self, size: int) -> int:
        """Bytes of memory that a pool of `size` bytes takes."""
        return size

    def map(self, descriptor: int) -> int:
        """Where the file behind a descriptor is mapped now."""
        return self._map_file(self.kernel.file(descriptor))

    def _map(self, descriptor: int, size: int) -> SimMemory:
        return SimMemory(self, self.map(descriptor), size, descriptor)

    def allocate(self, name: str, size: int) -> SimMemory:
        if self._is_full():
            raise NoMemory(f"no memory for the {size} bytes of {name!r}", size)
        return self._map(self.kernel.create(self.owner, size), size)

    def adopt(self, descriptor: int, size: int) -> SimMemory:
        file = self.kernel.file(descriptor)
        if not file.sealed or file.size != size or file.ended:
            self.kernel.close(descriptor)
            text = f"no sealed pool of {size} bytes, but {file.size}, or it has ended; attach without it"
            raise BadRequest(ErrorCode.BAD_POOL, text)
        return self._map(descriptor, size)
