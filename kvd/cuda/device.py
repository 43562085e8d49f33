"""The GPUs that this process sees: by ordinal, which CUDA_VISIBLE_DEVICES changes, and by UUID, which nothing does.

And streams of work for them.
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any, Self
from uuid import UUID

from kvd.cuda.driver import api, call, check
from kvd.errors import DeviceError, ErrorCode, refusal

_EXCLUSIVE = "another process than the daemon could not use the GPU; `nvidia-smi -c DEFAULT`"
_MPS = (
    "kernels of a killed worker may go on writing, and kvd could not tell when they end; stop it "
    "(`echo quit | nvidia-cuda-mps-control`), or unset CUDA_MPS_PIPE_DIRECTORY"
)


class Device:
    """The GPU number `ordinal`; its primary context is retained until the process ends.

    The context is shared with everything else in the process, such as torch. It is current only inside `current`.

    Raises:
        Unavailable: `NO_DEVICE`, there is no such GPU, or no driver; `DeviceError`, it does not work.

    """

    def __init__(self, ordinal: int) -> None:
        count = call("cuDeviceGetCount")
        if not 0 <= ordinal < count:
            text = f"no GPU {ordinal}: this process sees {count}, numbered from 0 ({_visible()})"
            raise refusal(ErrorCode.NO_DEVICE, text)
        self.ordinal = ordinal
        self._device = call("cuDeviceGet", ordinal)
        self.name: str = call("cuDeviceGetName", 96, self._device).split(b"\0")[0].decode()
        kind = "MIG" if " MIG " in self.name else "GPU"
        # Of a MIG instance, the older call has the UUID of the whole GPU; cuda-bindings 13 has only the newer.
        newer = hasattr(api(), "cuDeviceGetUuid_v2")
        found = call("cuDeviceGetUuid_v2" if newer else "cuDeviceGetUuid", self._device)
        self.uuid = f"{kind}-{UUID(bytes=bytes(found.bytes))}"
        """As `nvidia-smi -L` shows it; it is the same in every process."""

    @functools.cached_property
    def _context(self) -> Any:
        return call("cuDevicePrimaryCtxRetain", self._device)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes the context current for this thread inside the `with`."""
        call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            with contextlib.suppress(DeviceError):  # what was raised inside counts, else what the next call raises
                call("cuCtxPopCurrent")

    def attribute(self, name: str) -> int:
        """The attribute CU_DEVICE_ATTRIBUTE_`name`; 0 if the driver does not know it."""
        attribute = getattr(api().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        try:
            return 0 if attribute is None else int(call("cuDeviceGetAttribute", attribute, self._device))
        except DeviceError:
            return 0

    def free_and_total(self) -> tuple[int, int]:
        """Bytes of the GPU's memory: free, and in all."""
        with self.current():
            free, total = call("cuMemGetInfo")
        return int(free), int(total)

    def obstacle(self) -> str:
        """Why pools cannot be on this GPU and what to do; empty if they can."""
        if not self.attribute("VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED"):
            return f"{self} has no virtual memory management (VMM), which pools need; use another GPU or driver"
        if not self.attribute("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"):
            return f"{self} cannot share memory by file descriptors (no POSIX handles); use another GPU or driver"
        if self.attribute("MPS_ENABLED"):
            return f"{self} is used through MPS: {_MPS}"
        if self.attribute("COMPUTE_MODE") != 0:
            return f"{self} is in an exclusive or prohibited compute mode: {_EXCLUSIVE}"
        return ""

    def __str__(self) -> str:
        return f"GPU {self.ordinal} ({self.name}, {self.uuid})"


@functools.cache
def device(ordinal: int) -> Device:
    """The one `Device` of this process for an ordinal; raises like its constructor."""
    return Device(ordinal)


def device_of(uuid: str) -> Device:
    """The GPU with this UUID.

    Raises:
        Unavailable: `NO_DEVICE`, this process does not see it, or there is no driver.

    """
    seen = [device(ordinal) for ordinal in range(call("cuDeviceGetCount"))]
    for candidate in seen:
        if candidate.uuid == uuid:
            return candidate
    names = ", ".join(map(str, seen)) or "none"
    text = f"the pool is on {uuid}, which this process does not see: it sees {names} ({_visible()})"
    raise refusal(ErrorCode.NO_DEVICE, f"{text}; attach to that GPU's daemon, or make the GPU visible")


def _visible() -> str:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "CUDA_VISIBLE_DEVICES is not set" if value is None else f"CUDA_VISIBLE_DEVICES={value!r}"


class Stream:
    """Does what is put into it in order, beside all other streams. The device must be `current` in the thread."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.handle: Any = call("cuStreamCreate", api().CUstream_flags.CU_STREAM_NON_BLOCKING)

    def zero(self, address: int, length: int) -> None:
        """Zeroes `length` bytes of the GPU."""
        call("cuMemsetD8Async", address, 0, length, self.handle)

    def is_idle(self) -> bool:
        """Whether all is done.

        Raises:
            DeviceError: some of it failed.

        """
        (result,) = api().cuStreamQuery(self.handle)
        if result.name == "CUDA_ERROR_NOT_READY":
            return False
        check(result, "cuStreamQuery")
        return True

    def synchronize(self) -> None:
        """Waits until all is done, without holding up other threads.

        Raises:
            DeviceError: some of it failed.

        """
        call("cuStreamSynchronize", self.handle)

    def close(self) -> None:
        """Destroys the stream; what is in it is still done."""
        call("cuStreamDestroy", self.handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
