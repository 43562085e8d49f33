"""The checks of a transport whose pools are on the first GPU, as are its peers'."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvd.cuda.memory import Mapping
from tests.conformance.contract import CHECKS, Contract
from tests.transport.test_samehost import SameHostSite


class GpuBytes:
    """The first `size` bytes of a GPU's memory, as the checks look at them and change them."""

    def __init__(self, memory: Mapping, size: int) -> None:
        self._memory, self._size = memory, size

    def __getitem__(self, part: slice | int) -> Any:
        if isinstance(part, int):
            return self[part : part + 1][0]
        start, stop, _ = part.indices(self._size)
        return np.frombuffer(self._memory.read(start, stop - start), np.uint8)

    def __setitem__(self, part: slice, value: int) -> None:
        start, stop, _ = part.indices(self._size)
        self._memory.write(start, bytes([value]) * (stop - start))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self[:]

    def any(self) -> bool:
        return bool(self[:].any())


class GpuSite(SameHostSite):
    def memory(self, size: int) -> tuple[int, Any, int]:
        pool = self.pool_for(size)
        memory = GpuBytes(pool._mapping, size)
        memory[:] = 0
        return pool.base, memory, pool.descriptor


def main(folder: Path) -> None:
    """Runs all checks; stderr tells which."""
    site = GpuSite(folder, "cuda:0")
    try:
        for check in CHECKS:
            sys.stderr.write(f"{check}\n")
            asyncio.run(Contract(site).run(check))
    finally:
        site.close()
