"""NIXL's own preparation of a descriptor list: the yardstick for the cost of planning it."""

import numpy as np
from numpy.typing import NDArray

from kvd.bench.raw import RawAgent
from kvd.plan import Descriptors


class Preparation:
    """Two agents of this process over one region of memory; preparing moves no byte.

    The region is registered when a pool larger than all before is asked for, so only the first call for a pool pays.
    """

    def __init__(self) -> None:
        self._region: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)

    def __call__(self, descriptors: Descriptors, pool_bytes: int) -> None:
        """Prepares reads of `descriptors` between two pools of `pool_bytes` bytes, and forgets them."""
        if pool_bytes > len(self._region):
            self._open(pool_bytes)
        with self._reader.prepared(self._peer, self._region.ctypes.data, descriptors):
            pass

    def _open(self, size: int) -> None:
        self._region = np.empty(size, dtype=np.uint8)
        self._reader, owner = (RawAgent(f"{side}-{size}", self._region.ctypes.data, size) for side in ("plan", "pool"))
        owner.serve()
        self._peer = self._reader.connect(owner.metadata)
        owner.stop_serving()
        self._owner = owner
