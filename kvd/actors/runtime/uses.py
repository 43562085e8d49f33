"""What each block of an arena is used for, as numbers: one request may name hundreds of thousands of blocks."""

from array import array
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

_WRITTEN: Final = -1
_FEW: Final = 64
"""Blocks up to which a loop takes less time than calls of numpy, 7 us."""
_MANY: Final = 8192
"""Blocks of one call of numpy: what it makes of them stays in the cache, and takes no new pages."""


class Uses:
    """Of each block either that a pull writes to it, or in how many offers it stands, in 4 bytes.

    Block ids come as they are on the wire, little-endian u32, and are below `blocks`.
    """

    def __init__(self, blocks: int) -> None:
        self._uses = np.zeros(blocks, dtype=np.int32)  # a page of it takes memory once a block there is named
        self._one = self._uses.data

    def write(self, ids: bytes) -> int | None:
        """Marks free blocks as written to.

        If one is used, or named twice, nothing is marked, and it is returned.
        """
        few = len(ids) <= 4 * _FEW
        block, marked = self._write_few(ids) if few else self._write_many(ids)
        if block is not None:
            self.free(ids[: 4 * marked])
        return block

    def _write_few(self, ids: bytes) -> tuple[int | None, int]:
        """A block that cannot be marked, and how many are marked."""
        blocks = array("I", ids)
        for count, block in enumerate(blocks):
            if self._one[block]:
                return block, count
            self._one[block] = _WRITTEN
        return None, len(blocks)

    def _write_many(self, ids: bytes) -> tuple[int | None, int]:
        count, uses = 0, self._uses
        for blocks in _indexes(ids):
            used = uses[blocks] != 0
            if used.any():
                return int(blocks[used.argmax()]), count
            numbers = np.arange(1, len(blocks) + 1, dtype=np.int32)
            uses[blocks] = numbers
            overwritten = uses[blocks] != numbers  # by another number, as the block is named again
            count += len(blocks)
            if overwritten.any():
                return int(blocks[overwritten.argmax()]), count
            uses[blocks] = _WRITTEN
        return None, count

    def free(self, ids: bytes) -> None:
        """Nothing writes to these blocks any more."""
        for blocks in _indexes(ids):
            self._uses[blocks] = 0

    def offer(self, ids: bytes, change: int) -> None:
        """Counts one offer of these blocks more, or one less."""
        if len(ids) <= 4 * _FEW:
            for block in array("I", ids):
                self._one[block] += change
            return
        for blocks in _indexes(ids):
            np.add.at(self._uses, blocks, np.int32(change))

    def first_written(self, ids: bytes) -> int | None:
        """The first of these blocks that a pull writes to."""
        if len(ids) <= 4 * _FEW:
            return next((block for block in array("I", ids) if self._one[block] == _WRITTEN), None)
        for blocks in _indexes(ids):
            written = self._uses[blocks] == _WRITTEN
            if written.any():
                return int(blocks[written.argmax()])
        return None

    def is_free(self, block: int) -> bool:
        """Whether no pull writes to it, and it stands in no offer."""
        return self._one[block] == 0

    def is_offered(self, block: int) -> bool:
        """Whether it stands in an offer."""
        return self._one[block] > 0


def _indexes(ids: bytes) -> Iterator[NDArray[np.intp]]:
    """Some blocks at a time, in the one type of indexes that numpy does not convert one by one."""
    blocks = np.frombuffer(ids, dtype="<u4")
    for first in range(0, len(blocks), _MANY):
        yield blocks[first : first + _MANY].astype(np.intp)
