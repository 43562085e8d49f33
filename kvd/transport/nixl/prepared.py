"""What NIXL is given for one read: lists prepared chunk by chunk as slices are posted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvd.transport.slices import U64, Chunk, Slice

if TYPE_CHECKING:
    from kvd.transport.interface import ReadRequest


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
    """The prepared lists of one read.

    A chunk is prepared when its first slice is posted: preparing 4096 descriptors takes 0.3 ms, for which other reads
    wait. Slices come in order, so a chunk's lists are released once a later chunk has begun and the last of its own
    slices has ended; even a read of millions of descriptors holds few lists at a time.
    """

    def __init__(self, nixl: Any, request: ReadRequest) -> None:
        self._nixl = nixl
        self._request = request
        self._lists: dict[Chunk, _Lists] = {}
        self._latest: Chunk | None = None

    def transfer_of(self, piece: Slice) -> Any:
        """A NIXL transfer handle of one slice, for the caller to release; raises NIXL's errors."""
        lists = self._lists.get(piece.chunk) or self._prepare(piece.chunk)
        indices = np.arange(piece.start, piece.stop, dtype=np.int32)
        lists.posted += 1
        return self._nixl.make_prepped_xfer("READ", lists.local, indices, lists.remote, indices)

    def slice_ended(self, piece: Slice) -> None:
        """A slice passed to `transfer_of` has ended."""
        lists = self._lists.get(piece.chunk)
        if lists is not None:
            lists.posted -= 1
            self._release_if_done(piece.chunk)

    def release(self) -> None:
        """Releases what is left, once nothing more will be posted."""
        for lists in self._lists.values():
            lists.release()
        self._lists.clear()

    def _prepare(self, chunk: Chunk) -> _Lists:
        request = self._request
        local = self._side("NIXL_INIT_AGENT", chunk.dst, request.local_base, chunk.length)
        try:
            remote = self._side(request.agent, chunk.src, request.remote_base, chunk.length)
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
        rows = np.zeros((len(length), 3), dtype=np.uint64)  # address, bytes, device
        np.add(offset, np.uint64(base), out=rows[:, 0])
        rows[:, 1] = length
        return self._nixl.prep_xfer_dlist(agent, rows, mem_type="DRAM")
