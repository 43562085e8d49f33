"""Streams of work for a GPU."""

from types import TracebackType
from typing import Any, Self

from kvd.cuda.device import Device
from kvd.cuda.driver import api, call, check

_NOT_READY = "CUDA_ERROR_NOT_READY"


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
        if result.name == _NOT_READY:
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
