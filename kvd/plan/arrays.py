"""Descriptor arrays: what a plan is made of, and the joining of neighbours."""

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvd.errors import BadRequest, ErrorCode
from kvd.layout import Group

Ids: TypeAlias = NDArray[np.uint32]
Ints: TypeAlias = NDArray[np.int64]

_SPARSEST = 16  # slots an address up to which counting beats comparing: 3 ms against 80 for a million addresses


@dataclass(frozen=True)
class Descriptors:
    """What to copy: `length[i]` bytes from `src[i]` to `dst[i]`, each an offset from its pool's base. uint64 [N]."""

    src: NDArray[np.uint64]
    dst: NDArray[np.uint64]
    length: NDArray[np.uint64]

    @property
    def count(self) -> int:
        """How many descriptors there are."""
        return len(self.length)

    @cached_property
    def bytes(self) -> int:
        """How many bytes they move together."""
        return int(self.length.sum())


def join(src: Ints, dst: Ints, length: Ints) -> tuple[Ints, Ints, Ints]:
    """The fewest descriptors that move the same bytes: those adjacent on both sides become one. Sorted by source."""
    order = np.argsort(src, kind="stable")  # quick on arrays that are sorted in pieces, as plans are
    src, dst, length = src[order], dst[order], length[order]
    gap = np.empty(len(src), dtype=np.bool_)
    gap[:1] = True
    np.not_equal(src[1:], src[:-1] + length[:-1], out=gap[1:])
    gap[1:] |= dst[1:] != dst[:-1] + length[:-1]
    starts = np.flatnonzero(gap)
    if len(starts) == len(src):
        return src, dst, length
    return src[starts], dst[starts], np.add.reduceat(length, starts)


def ascending(addresses: Ints, step: int) -> Ints:
    """The indexes that sort `addresses`, which are all multiples of `step` apart; int64 [N]."""
    places = (addresses - addresses.min()) // step
    room = int(places.max()) + 1
    if room <= _SPARSEST * len(places):
        slots = np.full(room, -1, dtype=np.int64)
        slots[places] = np.arange(len(places))
        order = slots[slots >= 0]
        if len(order) == len(places):  # else an address occurs twice
            return order
    return np.argsort(addresses, kind="stable")


def check_ids(group: Group, ids: Ids) -> None:
    """Refuse block ids that `group` does not have.

    Raises:
        BadRequest: BAD_BLOCKS, naming the first such id.

    """
    if len(ids) and int(ids.max()) >= group.num_blocks:
        offending = int(ids[int(np.argmax(ids >= group.num_blocks))])
        raise BadRequest(ErrorCode.BAD_BLOCKS, f"block id {offending} is not below num_blocks = {group.num_blocks}")
