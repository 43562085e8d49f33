"""The bytes of workers' pools."""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt


def content_of(worker: Any, size: int) -> npt.NDArray[np.uint8]:
    """Those of a worker's pool, uint8 [size]; of one on a GPU, if it is the stand-in's and the CPU sees it."""
    memory = (ctypes.c_uint8 * size).from_address(worker.device_pool.pointer) if worker.device else worker.pool
    return np.frombuffer(memory, dtype=np.uint8, count=size)
