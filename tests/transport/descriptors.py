"""Descriptors written as rows, and reads of them."""

from collections.abc import Iterable

import numpy as np

from kvd.plan import Descriptors
from kvd.transport.interface import ReadRequest


def descriptors(rows: Iterable[tuple[int, int, int]]) -> Descriptors:
    """From rows of (src, dst, length)."""
    table = np.array(list(rows), dtype=np.uint64).reshape(-1, 3)
    return Descriptors(table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy())


def request(read: int, what: Descriptors, agent: str = "p", stamp: int = 0, *, part: bool = False) -> ReadRequest:
    """A read from and to the address 0."""
    return ReadRequest(read, agent, 0, 0, what, stamp, part=part)
