"""NIXL's prepared descriptor lists of one read, made chunk by chunk as its slices are posted."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvd.transport.queue import U64, Chunk, Slice


class PreparedRead:
    """The lists of both sides of a read, each as long as one of its chunks needs them.

    A chunk is prepared when its first slice is posted and released when its last one has ended: preparing 4096
    descriptors takes 0.3 ms, which is as long as other reads wait for it, and a read of millions holds few at a time.
    """

    def __init__(self, nixl: Any, agent: str, local_base: int, remote_base: int) -> None:
        self._nixl = nixl
        self._agent = agent
        self._local_base = local_base
        self._remote_base = remote_base
        self._sides: dict[Chunk, tuple[Any, Any]] = {}

    def transfer_of(self, piece: Slice) -> Any:
        """A NIXL transfer handle of one slice, for the caller to release; raises NIXL's errors."""
        local, remote = self._sides.get(piece.chunk) or self._prepare(piece.chunk)
        indices = np.arange(piece.start, piece.stop, dtype=np.int32)
        return self._nixl.make_prepped_xfer("READ", local, indices, remote, indices)

    def slice_ended(self, piece: Slice) -> None:
        """Releases the lists of the slice's chunk with its last slice."""
        piece.chunk.slices_left -= 1
        if not piece.chunk.slices_left:
            for side in self._sides.pop(piece.chunk, ()):
                side.release()

    def release(self) -> None:
        """Releases what is left: nothing more is posted."""
        for sides in self._sides.values():
            for side in sides:
                side.release()
        self._sides.clear()

    def _prepare(self, chunk: Chunk) -> tuple[Any, Any]:
        local = self._side("NIXL_INIT_AGENT", chunk.dst, self._local_base, chunk.length)
        try:
            remote = self._side(self._agent, chunk.src, self._remote_base, chunk.length)
        except Exception:
            local.release()
            raise
        self._sides[chunk] = (local, remote)
        return local, remote

    def _side(self, agent: str, offset: U64, base: int, length: U64) -> Any:
        rows = np.zeros((len(length), 3), dtype=np.uint64)  # address, bytes, device
        np.add(offset, np.uint64(base), out=rows[:, 0])
        rows[:, 1] = length
        return self._nixl.prep_xfer_dlist(agent, rows, mem_type="DRAM")
