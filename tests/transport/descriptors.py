"""Descriptors written as rows."""

from collections.abc import Iterable

import numpy as np

from kvd.plan import Descriptors


def descriptors(rows: Iterable[tuple[int, int, int]]) -> Descriptors:
    """From rows of (src, dst, length)."""
    table = np.array(list(rows), dtype=np.uint64).reshape(-1, 3)
    return Descriptors(table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy())
