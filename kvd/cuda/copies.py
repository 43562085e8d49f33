"""Many copies by one call, and host memory that a GPU copies to and from by itself.

Addresses are unified: the same copies go between a GPU and itself, other GPUs and the host, in either direction.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvd.cuda.device import Device, Stream
from kvd.cuda.driver import api, call, check
from kvd.errors import DeviceError, ErrorCode, refusal

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
