"""Many copies by one call or, within GPUs, by one kernel; and host memory that a GPU copies to and from by itself.

Addresses are unified: the same copies go between a GPU and itself, other GPUs and the host, in either direction.

The driver's call for many copies starts a kernel for each that stays on a GPU, which took an H200 3.4 us whatever its
length. Copies to and from host memory are better left to that call: the GPU's copy engines make them beside an engine's
kernels, while the kernels of two processes take turns. docs/gpu.md has the figures.
"""

import ctypes
import functools
from collections.abc import Callable
from importlib import resources
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvd.cuda.device import Device, Stream
from kvd.cuda.driver import api, call, check
from kvd.errors import DeviceError, ErrorCode, refusal
from kvd.limits import KIB

Words = NDArray[np.uint64]

_BATCH = "cuMemcpyBatchAsync"
_BATCH_FORMS = (13000, 12080)
"""The releases of CUDA that gave the call its forms, the newest first: up to 13.0 it says which copy failed."""


def copy(stream: Stream, targets: Words, sources: Words, lengths: Words) -> None:
    """Copies `lengths[i]` bytes from address `sources[i]` to `targets[i]`; each uint64 [N], in order of the stream.

    One call does all from driver 12.8 on, in any order: copies of one call must not overlap. Copies to and from host
    memory that is not `pin`ned are done before this returns.

    Raises:
        InternalError: the arrays differ in length.
        DeviceError: the driver refused.

    """
    count = len(lengths)
    if not len(targets) == len(sources) == count:
        text = f"{len(targets)} targets, {len(sources)} sources and {count} lengths: a copy takes one of each"
        raise refusal(ErrorCode.INTERNAL, text)
    if count == 0:
        return
    batch = _batch_call()
    if batch is None:
        for target, source, length in zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True):
            call("cuMemcpyAsync", target, source, length, stream.handle)
        return
    arrays = [np.ascontiguousarray(array, dtype=np.uint64) for array in (targets, sources, lengths)]
    check(batch(*(array.ctypes.data for array in arrays), count, int(stream.handle)), _BATCH)


def has_batches() -> bool:
    """Whether this driver takes many copies in one call; else each is a call of its own."""
    return _batch_call() is not None


def pin(device: Device, address: int, length: int, *, writable: bool) -> None:
    """Lets all GPUs copy to and from `length` bytes of this process at `address`, whole pages, until `unpin`.

    Raises:
        DeviceError: the driver refused: they are pinned already, no pages are there, or a limit on locked memory.

    """
    flags = api().CU_MEMHOSTREGISTER_PORTABLE | (0 if writable else api().CU_MEMHOSTREGISTER_READ_ONLY)
    with device.current():
        call("cuMemHostRegister", address, length, flags)


def unpin(device: Device, address: int) -> None:
    """Ends `pin`; copies there must have ended."""
    with device.current():
        call("cuMemHostUnregister", address)


@functools.cache
def _batch_call() -> Callable[..., int] | None:
    """The call with its attributes filled in, None if the driver has none; through ctypes, which takes addresses."""
    for since in _BATCH_FORMS:
        address = _address_of(since)
        if address:
            return _batch(address, names_failed=since < _BATCH_FORMS[0])
    return None


def _address_of(since: int) -> int:
    """Of the form of that release; 0 if the driver is older."""
    try:
        address, _ = call("cuGetProcAddress", _BATCH.encode(), since, 0)
    except DeviceError:
        return 0
    return int(address)


def _batch(address: int, *, names_failed: bool) -> Callable[..., int]:
    word, pointer = ctypes.c_size_t, ctypes.c_void_p
    failed = (pointer,) if names_failed else ()
    parameters = (pointer, pointer, pointer, word, pointer, pointer, word, *failed, pointer)
    function = ctypes.CFUNCTYPE(ctypes.c_int, *parameters)(address)
    attributes = api().CUmemcpyAttributes()
    attributes.srcAccessOrder = api().CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    first = word(0)  # the attributes hold from the first copy on
    nowhere = (None,) * len(failed)

    def batch(targets: int, sources: int, lengths: int, count: int, stream: int) -> Any:
        shared = attributes.getPtr(), ctypes.byref(first), 1
        return function(targets, sources, lengths, count, *shared, *nowhere, stream)

    return batch


# --- by one kernel ----------------------------------------------------------------------------------------------------

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
        """Copies like `copy` what it `takes`, one at least and no more than the table has rows.

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
