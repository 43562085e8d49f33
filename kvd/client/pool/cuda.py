"""The worker's side of a pool in a GPU's memory: imported by its descriptor, which is kept for a restarted daemon."""

import os
import weakref
from typing import Any

from kvd.client.pool import dlpack
from kvd.cuda.device import device_of
from kvd.cuda.driver import call
from kvd.cuda.memory import Mapping, read_mark
from kvd.errors import BadRequest, DeviceError, ErrorCode, Unavailable, refusal


class DeviceBytes:
    """`size` bytes at `pointer` of the GPU number `ordinal` of this process; uint8 [size] to every framework.

    `torch.as_tensor(view, device="cuda:N")`, `cupy.asarray(view)` and `from_dlpack(view)` share the memory. It stays
    mapped, at the same address, until this object and the last array made of it are gone.
    """

    def __init__(self, mapping: Mapping, size: int) -> None:
        self.pointer = mapping.base
        self.size = size
        self.ordinal = mapping.device.ordinal
        self.device = mapping.device.uuid
        # Not at the end of the process, which unmaps it anyway: kernels may still run then.
        weakref.finalize(self, _unmap, mapping).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the interface; nothing is pending on any stream."""
        data = (self.pointer, False)
        return {"version": 3, "shape": (self.size,), "typestr": "|u1", "data": data, "strides": None, "stream": None}

    def __dlpack__(self, **_options: Any) -> Any:
        return dlpack.capsule(self, self.pointer, self.size, self.ordinal)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self.ordinal


class DevicePool:
    """`size` of the `length` bytes behind `descriptor` on the GPU `uuid`; owns the descriptor from now on.

    Raises:
        BadRequest: `BAD_POOL`, it cannot be imported; the descriptor is closed.
        Unavailable: `NO_DEVICE`, this process does not see the GPU, or has no driver; the descriptor is closed.

    """

    def __init__(self, descriptor: int, uuid: str, size: int, length: int) -> None:
        try:
            self._mapping = _import(descriptor, uuid, size, length)
        except (BadRequest, Unavailable):
            os.close(descriptor)
            raise
        self.descriptor = descriptor
        self.view = DeviceBytes(self._mapping, size)

    def is_same(self, descriptor: int) -> bool:
        """Whether `descriptor` is of the same memory.

        Raises:
            BadRequest: `BAD_POOL`, it cannot even be mapped like this pool.
            Unavailable: `NO_DEVICE`, the GPU does not work.

        """
        other = _import(descriptor, self._mapping.device.uuid, self.view.size, self._mapping.length)
        try:
            return read_mark(other) == read_mark(self._mapping)
        finally:
            other.close()

    def close(self) -> None:
        """Closes the descriptor and lets go of the memory, which stays mapped until arrays on it are gone."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            del self.view


def _import(descriptor: int, uuid: str, size: int, length: int) -> Mapping:
    if not 0 < size <= length:
        raise refusal(ErrorCode.BAD_POOL, f"the daemon lent {length} bytes as a pool of {size}")
    device = device_of(uuid)
    try:
        return Mapping.map_descriptor(device, descriptor, length, writable=True)
    except DeviceError as error:
        text = f"the daemon's pool of {length} bytes cannot be mapped on {device}: {error.text}"
        raise refusal(ErrorCode.BAD_POOL, text) from error


def _unmap(mapping: Mapping) -> None:
    with mapping.device.current():
        call("cuCtxSynchronize")  # kernels may have been started that use it
    mapping.close()
