"""Pools in the memory of GPUs: mapped for reading, and copied by the GPU.

A GPU copies between itself, other GPUs and host memory alike. Imported late: only where a pool is on a GPU.
Threads wait for what it copies; of small copies within GPUs the loop itself sees whether they have landed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING

import structlog

from kvd import limits
from kvd.cuda.copies import CopyKernel, CopyTable, copy, pin, unpin
from kvd.cuda.device import Device, Stream, device_of
from kvd.cuda.memory import Mapping, check_export
from kvd.errors import DeviceError, ErrorCode, KvdError, Unavailable, refusal
from kvd.protocol.export import ExportedPool
from kvd.transport.samehost.copies import SMALL_DESCRIPTORS, Memory
from kvd.transport.samehost.lent import MappedPool, map_host_pool
from kvd.transport.slices import U64

if TYPE_CHECKING:
    from kvd.plan import Descriptors

_log = structlog.get_logger("kvd.transport")


class Gpu:
    """Copies by the GPU with the UUID `identity`, for pools on it and on whatever it reaches.

    Raises:
        Unavailable: `NO_DEVICE`, this process does not see it, or there is no driver.

    """

    def __init__(self, identity: str) -> None:
        self._device: Device = device_of(identity)
        self._own = threading.local()
        """Each thread's stream and table: copies of several threads run beside each other."""
        self._opened: list[Stream | CopyTable] = []
        self._pinned: set[int] = set()
        """Addresses of memory that is to be unpinned."""

    def copy(self, target: U64, source: U64, length: U64) -> None:
        """Copies `length[i]` bytes from address `source[i]` to `target[i]`; all have landed when it returns.

        Raises:
            DeviceError: the GPU refused, or failed; nothing more of it lands.
            InternalError: nobody knows what lands.

        """
        with self._device.current(), _done(self._stream()) as stream:
            copy(stream, target, source, length)

    def launches(self, descriptors: Descriptors) -> bool:
        """Whether `copy_within` makes these copies by a kernel: if not, a slice takes the longer the more it has."""
        kernel = self._kernel
        return kernel is not None and kernel.takes(descriptors.dst, descriptors.src, descriptors.length)

    def copy_within(self, target: U64, source: U64, length: U64) -> None:
        """Like `copy`, between the memory of GPUs alone: a slice, by one launch if all are multiples of 16 bytes."""
        kernel = self._kernel
        if kernel is None or not kernel.takes(target, source, length):
            self.copy(target, source, length)
            return
        with self._device.current():
            table = self._table()
            if table is None:
                self.copy(target, source, length)
                return
            with _done(self._stream()) as stream:
                kernel.copy(stream, table, target, source, length)

    @cached_property
    def small_copies(self) -> SmallCopies | None:
        """For the thread that asks; None if there is no kernel, or the driver refuses the rest. The log says so."""
        if self._kernel is None:
            return None
        try:
            with self._device.current():
                stream, table = self._stream(), CopyTable(SMALL_DESCRIPTORS)
        except KvdError as error:  # if the GPU is lost, the threads say so
            _log.warning("no table for small copies within GPUs: they wait for threads", reason=error.text)
            return None
        self._opened.append(table)
        return SmallCopies(self._device, self._kernel, stream, table)

    def map_pool(self, pool: ExportedPool, descriptor: int) -> MappedPool:
        """Maps a peer's pool so that this GPU reads it; the descriptor stays the caller's.

        Raises:
            KvdError: the descriptor is no such pool, or this GPU does not reach it.

        """
        if not pool.device:
            return self._pinnable(map_host_pool(pool, descriptor), pool.length)
        check_export(self._device, descriptor)
        mapping = Mapping.map_descriptor(self._device, descriptor, pool.length, writable=False)
        _ = self._kernel  # the driver compiles it now, and not while the first read waits

        def close() -> None:
            with _unless_lost():
                mapping.close()

        return MappedPool(Memory(mapping.base, min(pool.size, pool.length), pool.device), close)

    def pin(self, address: int, length: int, *, writable: bool = True) -> None:
        """Lets it copy to and from memory of this process by itself, until `unpin` or the end of the process.

        Raises:
            DeviceError: the driver refused.

        """
        pin(self._device, address, length, writable=writable)
        self._pinned.add(address)

    def try_to_pin(self, address: int, length: int, slower: str, *, writable: bool = True) -> None:
        """Like `pin`, if the driver lets us; otherwise it copies twice, and the log says that, and what is `slower`."""
        try:
            self.pin(address, length, writable=writable)
        except Unavailable as error:
            _log.warning(slower, reason=error.text)

    def unpin(self, address: int) -> None:
        """Ends `pin`, if it was; copies there must have ended."""
        if address in self._pinned:
            self._pinned.remove(address)
            with _unless_lost():
                unpin(self._device, address)

    def close(self) -> None:
        """Ends the streams, once no thread copies."""
        with _unless_lost(), self._device.current():
            for opened in self._opened:
                opened.close()
        self._opened.clear()

    @cached_property
    def _kernel(self) -> CopyKernel | None:
        try:
            return CopyKernel(self._device)
        except DeviceError as error:
            if error.lost:
                raise
            _log.warning("no kernel copies within GPUs: small blocks are copied slower", reason=error.text)
            return None

    def _stream(self) -> Stream:
        stream: Stream | None = getattr(self._own, "stream", None)
        if stream is None:
            stream = self._own.stream = Stream(self._device)
            self._opened.append(stream)
        return stream

    def _table(self) -> CopyTable | None:
        """None if there was no memory for it."""
        if not hasattr(self._own, "table"):
            self._own.table = None
            try:
                self._own.table = CopyTable(limits.GPU_SLICE_DESCRIPTORS)
            except DeviceError as error:
                if error.lost:
                    raise
                _log.warning("no table for copies within GPUs: small blocks are copied slower", reason=error.text)
            else:
                self._opened.append(self._own.table)
        table: CopyTable | None = self._own.table
        return table

    def _pinnable(self, pool: MappedPool, length: int) -> MappedPool:
        """The pool, to be pinned if the driver lets us."""
        address, slower = pool.memory.address, "a peer's pool cannot be pinned: copies to the GPU are slower"

        def close() -> None:
            self.unpin(address)
            pool.close()

        return MappedPool(pool.memory, close, partial(self.try_to_pin, address, length, slower, writable=False))


class SmallCopies:
    """Copies within GPUs by `kernel`, of `SMALL_DESCRIPTORS` at most, that are launched by a thread that cannot wait.

    One at a time: the next may be launched once `have_landed` said so, or `wait` ended. Nothing else uses `stream` and
    `table`.
    """

    def __init__(self, device: Device, kernel: CopyKernel, stream: Stream, table: CopyTable) -> None:
        self._device = device
        self._kernel = kernel
        self._stream = stream
        self._table = table

    def launch(self, target: U64, source: U64, length: U64) -> None:
        """Begins to copy `length[i]` bytes, that the kernel takes, from address `source[i]` to `target[i]`.

        Raises:
            DeviceError: the driver refused; `have_landed` tells whether anything may land yet.

        """
        with self._device.current():
            self._kernel.copy(self._stream, self._table, target, source, length)

    def have_landed(self) -> bool:
        """Whether all that was launched has landed; raises like `Gpu.copy`."""
        with _known(), self._device.current():
            return self._stream.is_idle()

    def wait(self) -> None:
        """Waits until all has landed; raises like `Gpu.copy`."""
        with _known(), self._device.current():
            self._stream.synchronize()


@contextmanager
def _done(stream: Stream) -> Iterator[Stream]:
    """Waits for what was put into the stream, whatever was raised meanwhile."""
    try:
        yield stream
    finally:
        with _known():
            stream.synchronize()


@contextmanager
def _known() -> Iterator[None]:
    """Tells an error after which nothing lands any more, as the context is lost, from one after which something may."""
    try:
        yield
    except DeviceError as error:
        if error.lost:
            raise
        raise refusal(ErrorCode.INTERNAL, f"{error.text}; what the GPU was told may still land") from error


@contextmanager
def _unless_lost() -> Iterator[None]:
    """Gives back what a GPU has; if its context is lost there is nothing to give back, and the process is to end."""
    try:
        yield
    except DeviceError as error:
        if not error.lost:
            raise
        _log.warning("a GPU is lost with what it had", reason=error.text)
