"""What NIXL is handed of one read: prepared lists, made chunk by chunk as slices are posted, or the whole at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvd.transport.nixl.queue import U64, Chunk, Slice

if TYPE_CHECKING:
    from kvd.plan import Descriptors


@dataclass(slots=True, eq=False)
class _Lists:
    """Both sides of a chunk, and how many of its slices are posted."""

    local: Any
    remote: Any
    posted: int = 0

    def release(self) -> None:
        self.local.release()
        self.remote.release()


class PreparedRead:
    """The lists of both sides of a read, each as long as one of its chunks needs them.

    A chunk is prepared when a slice of it is posted for the first time: preparing 4096 descriptors takes 0.3 ms, which
    is as long as other reads wait for it. Slices come in order, so a chunk is done with when a later one has begun and
    the last of its slices has ended; a read of millions of descriptors holds few at a time.
    """

    def __init__(self, nixl: Any, agent: str, local_base: int, remote_base: int) -> None:
        self._nixl = nixl
        self._agent = agent
        self._local_base = local_base
        self._remote_base = remote_base
        self._lists: dict[Chunk, _Lists] = {}
        self._latest: Chunk | None = None

    def transfer_of(self, piece: Slice) -> Any:
        """A NIXL transfer handle of one slice, for the caller to release; raises NIXL's errors."""
        lists = self._lists.get(piece.chunk) or self._prepare(piece.chunk)
        indices = np.arange(piece.start, piece.stop, dtype=np.int32)
        lists.posted += 1
        return self._nixl.make_prepped_xfer("READ", lists.local, indices, lists.remote, indices)

    def transfer_of_all(self, descriptors: Descriptors) -> Any:
        """A NIXL transfer handle of the whole read instead, for the caller to release; raises NIXL's errors.

        Without prepared lists, which would serve one transfer only: for one descriptor it takes a third less time.
        """
        local = [(self._local_base + dst, size, 0) for _, dst, size in descriptors.copies]
        remote = [(self._remote_base + src, size, 0) for src, _, size in descriptors.copies]
        sides = [self._nixl.get_xfer_descs(rows, mem_type="DRAM") for rows in (local, remote)]
        return self._nixl.initialize_xfer("READ", *sides, self._agent)

    def slice_ended(self, piece: Slice) -> None:
        """A slice that `transfer_of` was asked for is terminal."""
        lists = self._lists.get(piece.chunk)
        if lists is not None:
            lists.posted -= 1
            self._release_if_done(piece.chunk)

    def release(self) -> None:
        """Releases what is left: nothing more is posted."""
        for lists in self._lists.values():
            lists.release()
        self._lists.clear()

    def _prepare(self, chunk: Chunk) -> _Lists:
        local = self._side("NIXL_INIT_AGENT", chunk.dst, self._local_base, chunk.length)
        try:
            remote = self._side(self._agent, chunk.src, self._remote_base, chunk.length)
        except Exception:
            local.release()
            raise
        before, self._latest = self._latest, chunk
        if before is not None:
            self._release_if_done(before)
        lists = self._lists[chunk] = _Lists(local, remote)
        return lists

    def _release_if_done(self, chunk: Chunk) -> None:
        lists = self._lists.get(chunk)
        if lists is not None and not lists.posted and chunk is not self._latest:
            self._lists.pop(chunk).release()

    def _side(self, agent: str, offset: U64, base: int, length: U64) -> Any:
        return self._nixl.prep_xfer_dlist(agent, _rows(offset, base, length), mem_type="DRAM")


def _rows(offset: U64, base: int, length: U64) -> U64:
    """Address, bytes and device of each descriptor, uint64 [D, 3], as NIXL takes them."""
    rows = np.zeros((len(length), 3), dtype=np.uint64)
    np.add(offset, np.uint64(base), out=rows[:, 0])
    rows[:, 1] = length
    return rows
