"""`python -m benchmarks.copies`."""

import os

import numpy as np
import pytest

from benchmarks.copies.ways import WAYS
from kvd.memory.mapping import HUGE_PAGE, Mapping

PIECE = 4096


@pytest.mark.parametrize("way", WAYS)
def test_each_way_copies_the_same_bytes(way: str) -> None:
    file = os.memfd_create("source")
    os.ftruncate(file, HUGE_PAGE)
    content = np.random.default_rng(0).integers(0, 256, (HUGE_PAGE // PIECE, PIECE), dtype=np.uint8)
    os.pwrite(file, content.tobytes(), 0)
    mapping = Mapping(file, HUGE_PAGE, writable=False)
    target = np.zeros_like(content)
    order = np.random.default_rng(1).permutation(len(content)).astype(np.uint64)
    here = np.arange(len(content), dtype=np.uint64) * np.uint64(PIECE) + np.uint64(target.ctypes.data)
    WAYS[way](file, mapping, here, order * np.uint64(PIECE), np.full(len(content), PIECE, dtype=np.uint64))
    assert np.array_equal(target, content[order])
    mapping.close()
    os.close(file)
