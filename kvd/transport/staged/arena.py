"""The host memory of staging: an arena for each pool that peers read, and buffers for what is read from others.

An arena has a board and windows, and belongs to one pool, whose readers alone are told of it: the registration of such
a pool is its arena. The buffers have slots for what is read and rows for boards of peers; nobody is told of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvd import limits
from kvd.errors import KvdError
from kvd.transport.interface import Region
from kvd.transport.slices import U64
from kvd.transport.staged.messages import BOARD_BYTES, LINE_BYTES

Bytes = npt.NDArray[np.uint8]

ROWS: Final = 64
"""Boards that are read at a time."""

Copy = Callable[[U64, U64, U64, Callable[[str], None]], None]
"""As `Device.copy`; its end is told with what failed, or ""."""


class HostMemory(Protocol):
    """Memory of this host, which the network can register."""

    @property
    def region(self) -> Region:
        """Where it is."""

    @property
    def content(self) -> Bytes:
        """Its bytes, uint8 [size]; zeros at first."""

    def free(self) -> None:
        """Gives it back; nothing copies there any more."""


class Device(Protocol):
    """What staging needs of a GPU: copies, and host memory for them."""

    def allocate(self, size: int, done: Callable[[HostMemory | KvdError], None]) -> None:
        """Makes host memory that the GPU copies to; calls `done` on the loop with it, or with why there is none."""

    def free(self, memory: HostMemory) -> None:
        """Gives it back, some time later; nothing copies there any more."""

    def copy(self, targets: U64, sources: U64, lengths: U64, done: Callable[[KvdError | None], None]) -> None:
        """Copies `lengths[i]` bytes from address `sources[i]` to `targets[i]`.

        Calls `done` on the loop once all have landed, or once nothing lands any more, with what failed. With an
        `InternalError` the thread has raised what it should not, and nobody knows what lands.
        """

    def close(self) -> None:
        """Waits for the copies that run; the others are not made."""


class Arena:
    """The board and the windows of one pool, in `memory` of `size(windows)` bytes."""

    def __init__(self, memory: HostMemory, windows: int) -> None:
        self.memory = memory
        self.windows = windows
        self.base = memory.region.base
        """Its address."""

    @staticmethod
    def size(windows: int) -> int:
        """Bytes of an arena."""
        return BOARD_BYTES + windows * limits.SLICE_BYTES

    def write_line(self, line: int, text: bytes) -> None:
        """Writes a line of the board; a shorter text is filled up with zeros."""
        at = line * LINE_BYTES
        self.memory.content[at : at + LINE_BYTES] = np.frombuffer(text.ljust(LINE_BYTES, b"\0"), np.uint8)


def window_offset(window: int) -> int:
    """Where a window begins, in the arena of whoever has it."""
    return BOARD_BYTES + window * limits.SLICE_BYTES


class Buffers:
    """Rows and `slots`, in `memory` of `size(slots)` bytes; without pools on a GPU no slots are needed."""

    def __init__(self, memory: HostMemory, slots: int) -> None:
        self._memory = memory
        self.region = memory.region
        self.base = memory.region.base
        """Their address."""
        self.rows = list(range(ROWS))
        """Those that are free."""
        self.slots = list(range(slots))
        """Those that are free."""

    @staticmethod
    def size(slots: int) -> int:
        """Bytes of such buffers."""
        return ROWS * BOARD_BYTES + slots * limits.SLICE_BYTES

    @staticmethod
    def slot_offset(slot: int) -> int:
        """Where a slot begins."""
        return ROWS * BOARD_BYTES + slot * limits.SLICE_BYTES

    @staticmethod
    def row_offset(row: int) -> int:
        """Where a row begins."""
        return row * BOARD_BYTES

    def lines(self, row: int, count: int) -> list[bytes]:
        """The first lines of a peer's board that was read into a row."""
        at = self.row_offset(row)
        board = self._memory.content[at : at + count * LINE_BYTES].tobytes()
        return [board[line : line + LINE_BYTES] for line in range(0, len(board), LINE_BYTES)]


def packed(start: int, lengths: U64) -> U64:
    """Where pieces begin that lie one behind the other from `start` on."""
    return np.cumsum(lengths) - lengths + np.uint64(start)
