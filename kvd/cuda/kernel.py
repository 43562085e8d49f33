"""Many copies between the memory of GPUs by one kernel.

The driver's call for many copies (`kvd.cuda.copies`) starts a kernel for each that stays on a GPU, which took an H200
3.4 us whatever its length. Copies to and from host memory are better left to that call: the GPU's copy engines make
them beside an engine's kernels, while the kernels of two processes take turns. docs/gpu.md has the figures.
"""

import ctypes
from importlib import resources
from typing import Final

import numpy as np

from kvd.cuda.copies import Words
from kvd.cuda.device import Device, Stream
from kvd.cuda.driver import call
from kvd.limits import KIB

_THREADS: Final = 256
_UNIT: Final = 16
"""Bytes that a thread copies at once: all addresses and lengths are multiples."""
_PIECE: Final = 64 * KIB
"""Bytes that a block of threads copies at once."""
_BLOCKS: Final = 65536
"""Of threads; those of a short copy that is cut as a longer one needs it have nothing to do, in 2 ns each."""


class CopyTable:
    """Pinned host memory with a row for each of `most` copies; the device must be `current` in the thread.

    Raises:
        DeviceError: the driver has no memory for it.

    """

    def __init__(self, most: int) -> None:
        self.address = int(call("cuMemHostAlloc", most * 3 * 8, 0))
        words = (ctypes.c_uint64 * (3 * most)).from_address(self.address)
        self.rows = np.ctypeslib.as_array(words).reshape(most, 3)

    def close(self) -> None:
        """Gives the memory back; no kernel uses it any more."""
        del self.rows
        call("cuMemFreeHost", self.address)


class CopyKernel:
    """The kernel, compiled by the driver for `device`.

    Raises:
        DeviceError: the driver cannot compile it.

    """

    def __init__(self, device: Device) -> None:
        text = resources.files("kvd.cuda").joinpath("copy.ptx").read_bytes()
        with device.current():
            self._module = call("cuModuleLoadData", text + b"\0")
            self._function = call("cuModuleGetFunction", self._module, b"kvd_copy")

    def takes(self, targets: Words, sources: Words, lengths: Words) -> bool:
        """Whether all are multiples of its unit."""
        return not int(np.bitwise_or.reduce(targets | sources | lengths)) % _UNIT

    def copy(self, stream: Stream, table: CopyTable, targets: Words, sources: Words, lengths: Words) -> None:
        """Copies like `kvd.cuda.copies.copy` what it `takes`, one at least and no more than the table has rows.

        The table is in use until the stream has done it.

        Raises:
            DeviceError: the driver refused.

        """
        count = len(lengths)
        rows = table.rows[:count]
        rows[:, 0], rows[:, 1], rows[:, 2] = targets, sources, lengths
        pieces = max(1, min(-(-int(lengths.max()) // _PIECE), _BLOCKS // count))
        parameters = (table.address,), (ctypes.c_void_p,)
        call("cuLaunchKernel", self._function, count, pieces, 1, _THREADS, 1, 1, 0, stream.handle, parameters, 0)
