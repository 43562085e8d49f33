"""The stamps of this daemon's leases: words that peers read one-sidedly, before the blocks and after them.

A lease's stamp stays in its word while the lease lives, and is wiped before anybody is told that the lease ended. A
reader that finds it before the first byte knows that its ticket is right; one that finds it after the last byte has the
proof that the blocks were held until then (docs/fence.md). No worker can write to the words, which are the daemon's own
memory.
"""

import mmap
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvd import limits

Words = NDArray[np.uint64]


class StampMemory(Protocol):
    """`words`, uint64 [N, 2], at the address `base` of this process."""

    @property
    def base(self) -> int:
        """Address of the first word."""

    @property
    def words(self) -> Words:
        """The words."""


class HostStamps:
    """Words in this process's memory, mapped for the life of the process."""

    def __init__(self) -> None:
        mapped = mmap.mmap(-1, limits.MAX_STAMPS * limits.STAMP_BYTES)
        self.words: Words = np.frombuffer(mapped, dtype=np.uint64).reshape(limits.MAX_STAMPS, 2)
        self.base = int(self.words.ctypes.data)


class Stamps:
    """Gives words to leases. Words are numbered from 1; 0 is none."""

    def __init__(self, memory: StampMemory) -> None:
        self._words = memory.words
        self._free = list(range(len(memory.words), 0, -1))

    def put(self, stamp: int) -> int:
        """Writes a stamp into a free word and returns its number; 0 if none is free."""
        if not self._free:
            return 0
        number = self._free.pop()
        self._words[number - 1] = np.frombuffer(stamp.to_bytes(limits.STAMP_BYTES, "little"), dtype=np.uint64)
        return number

    def wipe(self, number: int) -> None:
        """Wipes the stamp: once this returns, no reader finds it."""
        if number:
            self._words[number - 1] = 0
            self._free.append(number)
