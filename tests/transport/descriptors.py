"""A stand-in of the shape of `kvd.plan.Descriptors`."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """`length[i]` bytes from offset `src[i]` of one pool to offset `dst[i]` of another; uint64 `[N]` each."""

    src: npt.NDArray[np.uint64]
    dst: npt.NDArray[np.uint64]
    length: npt.NDArray[np.uint64]

    @property
    def bytes(self) -> int:
        return int(self.length.sum())

    @property
    def count(self) -> int:
        return len(self.length)


def descriptors(rows: Iterable[tuple[int, int, int]]) -> Descriptors:
    """From rows of (src, dst, length)."""
    table = np.array(list(rows), dtype=np.uint64).reshape(-1, 3)
    return Descriptors(table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy())
