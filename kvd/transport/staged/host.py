"""Staging on a real host: its memory are memfds, which the network's process maps, too, and a GPU's threads copy."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np
import structlog

from kvd import limits
from kvd.errors import KvdError
from kvd.memory.memfd import MemfdPool, MemfdProvider
from kvd.transport.interface import Network, Region
from kvd.transport.on_loop import outcome
from kvd.transport.slices import U64
from kvd.transport.staged.arena import Buffers, Bytes, HostMemory
from kvd.transport.staged.transport import StagedTransport

T = TypeVar("T")

_log = structlog.get_logger("kvd.transport")


class MemfdMemory:
    """`kvd.transport.staged.arena.HostMemory` of `size` bytes; no peer is told of it if it is `hidden`.

    Raises:
        KvdError: `NO_MEMORY`, or no descriptor is left for it.

    """

    def __init__(self, size: int, *, hidden: bool = False) -> None:
        self._memory: MemfdPool = MemfdProvider().allocate("staging", size)
        base, length = self._memory.base, self._memory.length
        self.region = Region(base, size, self._memory.descriptor, length=length, hidden=hidden)
        self.content: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(base))

    def free(self) -> None:
        """Gives it back."""
        self._memory.free()


class Gpu:
    """`kvd.transport.staged.arena.Device`: the GPU with this UUID, on `threads` threads.

    Raises:
        Unavailable: `NO_DEVICE`, this process does not see it, or there is no driver.

    """

    def __init__(self, uuid: str, threads: int, loop: asyncio.AbstractEventLoop) -> None:
        from kvd.transport.samehost.gpu import Gpu as Copies  # noqa: PLC0415 - nothing of CUDA is loaded without a GPU

        self._gpu = Copies(uuid)
        self._loop = loop
        self._threads = ThreadPoolExecutor(threads, "kvd-stage")

    def pin(self, region: Region) -> None:
        """Lets the GPU copy there by itself, if the driver lets us; otherwise the driver copies twice."""
        slower = "staging memory cannot be pinned: reads from other hosts are slower"
        self._gpu.try_to_pin(region.base, region.length, slower)

    def allocate(self, size: int, done: Callable[[HostMemory | KvdError], None]) -> None:
        """Makes memory on a thread."""
        self._run(partial(self._make, size), done)

    def _make(self, size: int) -> HostMemory:
        memory = MemfdMemory(size)
        self.pin(memory.region)
        return memory

    def free(self, memory: HostMemory) -> None:
        """Gives it back on a thread."""
        self._run(partial(self._free, memory), _log_failure)

    def _free(self, memory: HostMemory) -> None:
        self._gpu.unpin(memory.region.base)
        memory.free()

    def copy(self, targets: U64, sources: U64, lengths: U64, done: Callable[[KvdError | None], None]) -> None:
        """Copies on a thread."""
        self._run(partial(self._gpu.copy, targets, sources, lengths), done)

    def close(self) -> None:
        """Waits for the copies that run; the others are not made."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._gpu.close()

    def _run(self, work: Callable[[], T], done: Callable[[T | KvdError], None]) -> None:
        running = self._loop.run_in_executor(self._threads, work)
        running.add_done_callback(partial(_tell, done))


def _tell(done: Callable[[T | KvdError], None], running: asyncio.Future[T]) -> None:
    if not running.cancelled():
        ended = outcome(running, "a thread of staging failed")
        done(ended)


def _log_failure(error: KvdError | None) -> None:
    if error is not None:
        _log.error("staging memory is not given back", reason=error.text)


def staged(network: Network, loop: asyncio.AbstractEventLoop, *, device: str, threads: int) -> StagedTransport:
    """`network` with pools on the GPU `device`, a UUID; if that is empty, it reads those of others.

    Raises:
        NoMemory: there is none for the buffers.
        Unavailable: `NO_DEVICE`, there is no such GPU.

    """
    slots = limits.STAGING_SLOTS if device else 0
    memory = MemfdMemory(Buffers.size(slots), hidden=True)
    gpu = Gpu(device, threads, loop) if device else None
    if gpu is not None:
        gpu.pin(memory.region)
    return StagedTransport(network, Buffers(memory, slots), gpu, loop)
