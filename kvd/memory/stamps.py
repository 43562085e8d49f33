"""The stamps of this daemon's leases: words that peers read one-sidedly, after the blocks.

A lease's stamp lies in its word for as long as the lease is alive, and is wiped before anybody is told that the lease
has ended. Whoever finds it after the last byte of a read has the proof that the blocks were held until then
(docs/fence.md). The words are the daemon's own memory, which no worker can write.
"""

import mmap
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvd import limits

Words = NDArray[np.uint64]


class StampMemory(Protocol):
    """Where the words lie: `words`, uint64 [N], at the address `base` of this process."""

    @property
    def base(self) -> int:
        """Address of the first word."""

    @property
    def words(self) -> Words:
        """The words."""


class HostStamps:
    """Words in this process's memory, which is mapped for as long as the process lives."""

    def __init__(self) -> None:
        mapped = mmap.mmap(-1, limits.MAX_STAMPS * limits.STAMP_BYTES)
        self.words: Words = np.frombuffer(mapped, dtype=np.uint64)
        self.base = int(self.words.ctypes.data)


class Stamps:
    """Which lease has which word. Words are numbered from 1; 0 stands for none."""

    def __init__(self, memory: StampMemory) -> None:
        self._words = memory.words
        self._free = list(range(len(memory.words), 0, -1))

    def put(self, stamp: int) -> int:
        """Writes a stamp into a free word and returns its number, 0 where no word is free."""
        if not self._free:
            return 0
        number = self._free.pop()
        self._words[number - 1] = stamp
        return number

    def wipe(self, number: int) -> None:
        """Takes the stamp away: from the return of this call on nobody finds it."""
        if number:
            self._words[number - 1] = 0
            self._free.append(number)
