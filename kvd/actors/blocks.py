"""Which destination blocks are in use by pulls: two pulls never write to the same memory."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvd.errors import BadRequest, ErrorCode, Unavailable
from kvd.layout import CacheSpec
from kvd.protocol.types import Span


class BusyBlocks:
    """One flag for each block of each arena; groups of one arena share memory and so share flags."""

    def __init__(self, spec: CacheSpec) -> None:
        blocks: dict[int, int] = {}
        for group in spec.groups:
            blocks[group.arena] = max(blocks.get(group.arena, 0), group.num_blocks)
        self._arena_of = [group.arena for group in spec.groups]
        self._busy: dict[int, NDArray[np.bool_]] = {arena: np.zeros(n, np.bool_) for arena, n in blocks.items()}

    def take(self, spans: Sequence[Span]) -> None:
        """Marks the blocks of `spans`, all or none.

        Raises:
            Unavailable: `BLOCKS_BUSY`, one is being written to by a pull that has not ended, or is in quarantine.
            BadRequest: `BAD_BLOCKS`, one is named twice.

        """
        taken: list[tuple[NDArray[np.bool_], NDArray[np.uint32]]] = []
        try:
            for span in spans:
                busy = self._busy[self._arena_of[span.group]]
                ids = np.frombuffer(span.ids, dtype="<u4")
                self._check(busy, ids, taken, span.group)
                busy[ids] = True
                taken.append((busy, ids))
        except (BadRequest, Unavailable):
            for busy, ids in taken:
                busy[ids] = False
            raise

    def _check(
        self,
        busy: NDArray[np.bool_],
        ids: NDArray[np.uint32],
        taken: Sequence[tuple[NDArray[np.bool_], NDArray[np.uint32]]],
        group: int,
    ) -> None:
        if busy[ids].any():
            block = ids[int(np.argmax(busy[ids]))]
            if any(other is busy and block in earlier for other, earlier in taken):
                text = f"block {block} of group {group} is named by another group too, which lies in the same memory"
                raise BadRequest(ErrorCode.BAD_BLOCKS, text)
            text = f"block {block} of group {group} belongs to a pull that has not ended or is in quarantine"
            raise Unavailable(ErrorCode.BLOCKS_BUSY, text)
        if len(ids) > 1:
            ordered = np.sort(ids)
            twice = ordered[1:][ordered[1:] == ordered[:-1]]
            if len(twice):
                raise BadRequest(ErrorCode.BAD_BLOCKS, f"block {twice[0]} of group {group} is named twice")

    def give_back(self, spans: Sequence[Span]) -> None:
        """Unmarks the blocks of `spans`, which were taken together."""
        for span in spans:
            self._busy[self._arena_of[span.group]][np.frombuffer(span.ids, dtype="<u4")] = False

    @property
    def count(self) -> int:
        """Blocks that are marked."""
        return sum(int(busy.sum()) for busy in self._busy.values())
