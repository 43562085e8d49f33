"""The worker's side of a pool in a GPU's memory: imported by its descriptor, which is kept for a restarted daemon."""

import ctypes
import fcntl
import os
import weakref
from typing import Any, Final

from kvd.client import dlpack
from kvd.cuda.device import device_of
from kvd.cuda.driver import call
from kvd.cuda.memory import Mapping
from kvd.errors import BadRequest, DeviceError, ErrorCode, Unavailable

_F_DUPFD_QUERY: Final = 1027  # Linux 6.10
_KCMP: Final = 312 if os.uname().machine == "x86_64" else 272
_KCMP_FILE: Final = 0
_libc = ctypes.CDLL(None, use_errno=True)


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
    """`size` of the `length` bytes behind `descriptor` on the GPU `identity`; owns the descriptor from now on.

    Raises:
        BadRequest: `BAD_POOL`, it cannot be imported; the descriptor is closed.
        Unavailable: `NO_DEVICE`, this process does not see the GPU, or has no driver; the descriptor is closed.

    """

    def __init__(self, descriptor: int, identity: str, size: int, length: int) -> None:
        try:
            self.view = DeviceBytes(_import(descriptor, identity, size, length), size)
        except (BadRequest, Unavailable):
            os.close(descriptor)
            raise
        self.descriptor = descriptor

    def is_same(self, descriptor: int) -> bool:
        """Whether `descriptor` is of the same memory: daemons pass on the one open file that was lent at first.

        Raises:
            Unavailable: `NO_DEVICE`, this kernel does not tell.

        """
        return _is_same_open_file(self.descriptor, descriptor)

    def close(self) -> None:
        """Closes the descriptor and lets go of the memory, which stays mapped until arrays on it are gone."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            del self.view


def _import(descriptor: int, identity: str, size: int, length: int) -> Mapping:
    if not 0 < size <= length:
        raise BadRequest(ErrorCode.BAD_POOL, f"the daemon lent {length} bytes as a pool of {size}")
    device = device_of(identity)
    try:
        return Mapping.map_descriptor(device, descriptor, length, writable=True)
    except DeviceError as error:
        text = f"the daemon's pool of {length} bytes cannot be mapped on {device}: {error.text}"
        raise BadRequest(ErrorCode.BAD_POOL, text) from error


def _unmap(mapping: Mapping) -> None:
    with mapping.device.current():
        call("cuCtxSynchronize")  # kernels may have been started that use it
    mapping.close()


def _is_same_open_file(first: int, second: int) -> bool:
    """All exports of a driver are the same file to stat(2), so it takes the newer fcntl(2), or kcmp(2)."""
    try:
        return bool(fcntl.fcntl(first, _F_DUPFD_QUERY, second))
    except OSError:
        pass  # an older kernel
    order = _libc.syscall(_KCMP, os.getpid(), os.getpid(), _KCMP_FILE, first, second)
    if order >= 0:
        return bool(order == 0)
    reason = os.strerror(ctypes.get_errno())
    text = f"whether the daemon lent the same pool cannot be told: kcmp(2): {reason}"
    raise Unavailable(ErrorCode.NO_DEVICE, f"{text}; allow kcmp in the seccomp profile, or use Linux 6.10")
