"""Copies out of memory that a peer lends, also where it takes its pages away."""

import os
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.memory.mapping import HUGE_PAGE, Mapping, give_back
from kvd.transport.samehost.copies import Memory
from kvd.transport.samehost.lent import LARGE, copy_lent

BYTES = 4 * HUGE_PAGE
CONTENT = np.random.default_rng(0).integers(0, 256, BYTES, dtype=np.uint8)
SIZES = st.sampled_from((1, 4096, LARGE - 1, LARGE, LARGE + 1))


class Lent:
    """A file as a peer lends it, and `target`, where it is copied to."""

    def __init__(self) -> None:
        self.file = os.memfd_create("lent")
        os.ftruncate(self.file, BYTES)
        self.content = CONTENT
        os.pwrite(self.file, self.content.tobytes(), 0)
        self.mapping = Mapping(self.file, BYTES, writable=False)
        self.target = np.zeros(BYTES, dtype=np.uint8)

    def copy(self, *pieces: tuple[int, int, int]) -> None:
        """Copies pieces: to which offset, from which, and how many bytes."""
        to, at, length = (np.array(each, dtype=np.uint64) for each in zip(*pieces, strict=True))
        target, source = to + np.uint64(self.target.ctypes.data), at + np.uint64(self.mapping.base)
        copy_lent(Memory(self.mapping.base, BYTES, file=self.file), target, source, length)

    @property
    def present(self) -> int:
        """Bytes of the file that are in memory."""
        return os.fstat(self.file).st_blocks * 512

    def close(self) -> None:
        self.mapping.close()
        os.close(self.file)


@pytest.fixture
def lent() -> Iterator[Lent]:
    made = Lent()
    yield made
    made.close()


@given(st.lists(SIZES, min_size=1, max_size=7), st.randoms(use_true_random=False))
def test_large_and_small_pieces_arrive_together(sizes: list[int], random: Random) -> None:
    lent = Lent()
    to = dict(zip(range(len(sizes)), starts(sizes), strict=True))
    order = random.sample(range(len(sizes)), len(sizes))
    at = dict(zip(order, starts([sizes[piece] for piece in order]), strict=True))
    lent.copy(*((to[piece], at[piece], size) for piece, size in enumerate(sizes)))
    for piece, size in enumerate(sizes):
        copied = lent.target[to[piece] : to[piece] + size]
        assert np.array_equal(copied, lent.content[at[piece] : at[piece] + size])
    assert not lent.target[sum(sizes) :].any()
    lent.close()


def starts(sizes: list[int]) -> list[int]:
    """Where each begins if they lie one behind the other."""
    return [sum(sizes[:piece]) for piece in range(len(sizes))]


@pytest.mark.parametrize("size", [LARGE, 16384], ids=["large", "small"])
def test_where_pages_were_taken_away_zeros_are_found_and_no_new_pages_made(lent: Lent, size: int) -> None:
    whole = [(at, at, size) for at in range(0, BYTES, size)]
    lent.copy(*whole)
    assert np.array_equal(lent.target, lent.content)
    give_back(lent.file, BYTES)
    lent.copy(*whole)
    assert not lent.target.any()
    assert lent.present == 0


@pytest.mark.parametrize(("size", "call"), [(LARGE, "pread"), (4096, "process_vm_readv")])
def test_a_file_that_was_cut_ends_a_copy_by_an_error_and_not_the_process_by_a_signal(
    lent: Lent, size: int, call: str
) -> None:
    os.ftruncate(lent.file, BYTES - size)
    with pytest.raises(OSError, match=call):
        lent.copy((0, BYTES - size, size))
