"""The host memory of staging: a board and windows that peers read, slots for what is read, rows for boards of peers."""

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


def arena_bytes(windows: int) -> int:
    """Bytes of an arena; 0 windows suffice where no pool is on a GPU."""
    return BOARD_BYTES + 2 * windows * limits.SLICE_BYTES + ROWS * BOARD_BYTES


Copy = Callable[[U64, U64, U64, Callable[[str], None]], None]
"""As `Copier.copy`; its end is told with what failed, or ""."""


class Copier(Protocol):
    """Copies of a GPU."""

    def copy(self, targets: U64, sources: U64, lengths: U64, done: Callable[[KvdError | None], None]) -> None:
        """Copies `lengths[i]` bytes from address `sources[i]` to `targets[i]`.

        Calls `done` on the loop once all have landed, or once nothing lands any more, with what failed.
        """

    def close(self) -> None:
        """Waits for the copies that run; the others are not made."""


class Arena:
    """`memory` (uint8 [`arena_bytes`]) at the address of `region`."""

    def __init__(self, region: Region, memory: Bytes, windows: int) -> None:
        self.region = region
        self.windows = windows
        self._memory = memory
        self.rows = list(range(ROWS))
        """Those that are free."""
        self.slots = list(range(windows))
        """Those that are free."""
        self._memory[:BOARD_BYTES] = 0

    @property
    def base(self) -> int:
        """Its address."""
        return self.region.base

    def write_line(self, window: int, line: bytes) -> None:
        """Writes a line of the board; a shorter one is filled up with zeros."""
        at = window * LINE_BYTES
        self._memory[at : at + LINE_BYTES] = np.frombuffer(line.ljust(LINE_BYTES, b"\0"), np.uint8)

    def slot_offset(self, slot: int) -> int:
        """Where a slot begins."""
        return window_offset(self.windows + slot)

    def row_offset(self, row: int) -> int:
        """Where a row begins."""
        return window_offset(2 * self.windows) + row * BOARD_BYTES

    def lines(self, row: int, count: int) -> list[bytes]:
        """The first lines of a peer's board that was read into a row."""
        at = self.row_offset(row)
        board = self._memory[at : at + count * LINE_BYTES].tobytes()
        return [board[line : line + LINE_BYTES] for line in range(0, len(board), LINE_BYTES)]


def window_offset(window: int) -> int:
    """Where a window begins, in the arena of whoever has it."""
    return BOARD_BYTES + window * limits.SLICE_BYTES


def packed(start: int, lengths: U64) -> U64:
    """Where pieces begin that lie one behind the other from `start` on."""
    return np.cumsum(lengths) - lengths + np.uint64(start)
