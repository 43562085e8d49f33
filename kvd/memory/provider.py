"""Which provider makes the pools of a device."""

import re

from kvd.errors import ErrorCode, Unavailable, refusal
from kvd.memory.interface import MemoryProvider
from kvd.memory.memfd import Backing, MemfdProvider
from kvd.memory.room import Room


def provider_for(device: str, backing: Backing = Backing.AUTO, *, mappings: int = 1) -> MemoryProvider:
    """The provider for `device`: `cpu` or `cuda:N`.

    For host memory, `backing` chooses the pages of pools; `mappings` says how many processes of the daemon map them.

    Raises:
        BadRequest: `BAD_CONFIG`, there is no such kind of device.
        Unavailable: `NO_DEVICE`, there is no such GPU, or pools cannot be on it; the text says why.

    """
    if device == "cpu":
        return MemfdProvider(backing, Room(mappings=mappings))
    if (gpu := re.fullmatch(r"cuda:(\d+)", device)) is None:
        raise refusal(ErrorCode.BAD_CONFIG, f"device {device!r} is neither `cpu` nor `cuda:N`")
    from kvd.memory.cuda import CudaProvider  # noqa: PLC0415 - without a GPU, nothing of CUDA is loaded

    try:
        return CudaProvider(int(gpu[1]))
    except Unavailable as error:
        raise refusal(error.code, f"no pools on {device!r}: {error.text}; or set the device to `cpu`") from error
