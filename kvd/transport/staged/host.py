"""Staging on a real host: the arena is a memfd, which the network's process maps, too, and a GPU's threads copy."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import structlog

from kvd import limits
from kvd.errors import DeviceError, KvdError
from kvd.memory.memfd import MemfdProvider
from kvd.transport.interface import Network, Region
from kvd.transport.slices import U64
from kvd.transport.staged.arena import Arena, arena_bytes
from kvd.transport.staged.transport import StagedTransport

_log = structlog.get_logger("kvd.transport")


class GpuCopier:
    """`kvd.transport.staged.arena.Copier` by the GPU with this UUID, on `threads` threads.

    Raises:
        Unavailable: `NO_DEVICE`, this process does not see it, or there is no driver.

    """

    def __init__(self, uuid: str, threads: int, loop: asyncio.AbstractEventLoop) -> None:
        from kvd.transport.samehost.gpu import Gpu  # noqa: PLC0415 - nothing of CUDA is loaded without a GPU

        self._gpu = Gpu(uuid)
        self._loop = loop
        self._threads = ThreadPoolExecutor(threads, "kvd-stage")

    def pin(self, region: Region) -> None:
        """Lets the GPU copy there by itself, if the driver lets us; otherwise the driver copies twice."""
        try:
            self._gpu.pin(region.base, region.length)
        except DeviceError as error:
            _log.warning("staging memory cannot be pinned: reads from other hosts are slower", reason=error.text)

    def copy(self, targets: U64, sources: U64, lengths: U64, done: Callable[[KvdError | None], None]) -> None:
        """Copies on a thread."""
        copying = self._loop.run_in_executor(self._threads, self._gpu.copy, targets, sources, lengths)
        copying.add_done_callback(partial(_tell, done))

    def close(self) -> None:
        """Waits for the copies that run; the others are not made."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._gpu.close()


def _tell(done: Callable[[KvdError | None], None], copying: asyncio.Future[None]) -> None:
    if copying.cancelled():
        return
    error = copying.exception()
    if error is not None and not isinstance(error, KvdError):
        raise error
    done(error)


def staged(network: Network, loop: asyncio.AbstractEventLoop, *, device: str, threads: int) -> StagedTransport:
    """`network` with pools on the GPU `device`, a UUID; if that is empty, it reads those of others.

    Raises:
        NoMemory: there is none for the staging memory.
        Unavailable: `NO_DEVICE`, there is no such GPU.

    """
    windows = limits.STAGING_WINDOWS if device else 0
    size = arena_bytes(windows)
    memory = MemfdProvider().allocate("staging", size)
    region = Region(memory.base, size, memory.descriptor, length=memory.length)
    view = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(memory.base))
    copier = GpuCopier(device, threads, loop) if device else None
    if copier is not None:
        copier.pin(region)
    return StagedTransport(network, Arena(region, view, windows), copier, loop)
