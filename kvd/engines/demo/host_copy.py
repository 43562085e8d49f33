"""A pool on a GPU for an engine that computes on the CPU: a copy of the pool in host memory, block by block."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvd.client import Worker
from kvd.cuda.copies import copy
from kvd.cuda.device import device_of
from kvd.cuda.streams import Stream
from kvd.layout import CacheSpec
from kvd.plan import Planner, Span, route

U64 = NDArray[np.uint64]


class HostCopy:
    """`content` is laid out as the pool of `worker`, whose spec is number `rank` of all its engine's `specs`.

    Raises:
        Unavailable: `NO_DEVICE`, this process does not see the pool's GPU.

    """

    def __init__(self, worker: Worker, specs: Sequence[CacheSpec], rank: int) -> None:
        spec = specs[rank]
        self._device = device_of(worker.device)
        self._pool = worker.device_pool
        self._bytes = np.zeros(spec.pool_bytes, np.uint8)
        [share] = route(specs, spec).shares
        self._planner = Planner(specs[share.source], spec, share)

    @property
    def content(self) -> memoryview:
        """The bytes, writable."""
        return self._bytes.data

    def to_gpu(self, blocks: Sequence[int]) -> None:
        """Copies blocks to the pool; they are there when it returns."""
        offsets, lengths = self._pieces(blocks)
        self._copy(offsets + np.uint64(self._pool.pointer), offsets + np.uint64(self._bytes.ctypes.data), lengths)

    def from_gpu(self, blocks: Sequence[int]) -> None:
        """Copies blocks out of the pool."""
        offsets, lengths = self._pieces(blocks)
        self._copy(offsets + np.uint64(self._bytes.ctypes.data), offsets + np.uint64(self._pool.pointer), lengths)

    def _pieces(self, blocks: Sequence[int]) -> tuple[U64, U64]:
        """Where these blocks lie in the pool, and how long each piece is."""
        ids = np.asarray(blocks, np.uint32)
        planned = self._planner.plan([Span(0, ids, 0, ids)])
        return planned.dst, planned.length

    def _copy(self, targets: U64, sources: U64, lengths: U64) -> None:
        with self._device.current(), Stream(self._device) as stream:
            copy(stream, targets, sources, lengths)
            stream.synchronize()
