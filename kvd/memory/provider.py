"""Which provider makes the pools of a device."""

import re

from kvd.errors import BadRequest, ErrorCode, Unavailable
from kvd.memory.interface import MemoryProvider
from kvd.memory.memfd import Backing, MemfdProvider


def provider_for(device: str, backing: Backing = Backing.AUTO) -> MemoryProvider:
    """The provider for `device`: `cpu` or `cuda:N`. `backing` chooses the pages of host memory.

    Raises:
        BadRequest: `BAD_CONFIG`, there is no such kind of device.
        Unavailable: `NO_DEVICE`, this version has no provider for it.

    """
    if device == "cpu":
        return MemfdProvider(backing)
    if re.fullmatch(r"cuda:\d+", device):
        raise Unavailable(
            ErrorCode.NO_DEVICE,
            f"no CUDA device: this version of kvd makes pools of host memory only, not on {device!r}; "
            "set the device to `cpu`",
        )
    raise BadRequest(ErrorCode.BAD_CONFIG, f"device {device!r} is neither `cpu` nor `cuda:N`")
