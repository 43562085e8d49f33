"""Memory of a GPU that processes share: one allocation, one mapping of all of it, one POSIX file descriptor.

The descriptor keeps the allocation alive in whatever process holds it, as a memfd does. Unlike a memfd it cannot be
sealed, tells nothing about itself, and cannot be emptied: whoever has mapped it keeps its bytes until it unmaps.

So a pool's memory has a mark at its end, which says that it is one, and which. To stat(2) all exports of a driver are
one device, and what compares open files is new (F_DUPFD_QUERY) or forbidden in many containers (kcmp).
"""

import contextlib
import ctypes
import os
import struct
from functools import cache, partial
from typing import Any, Final, Self

from kvd import foreign
from kvd.cuda.device import Device, Stream
from kvd.cuda.driver import api, call
from kvd.errors import ErrorCode, on_error, refusal


class Mapping:
    """`length` bytes of an allocation at `base`, an address of GPUs that is valid in this process.

    Made by `allocate` and `map_descriptor`. Not thread-safe; any thread may use it.
    """

    def __init__(self, device: Device, handle: Any, length: int, *, writable: bool) -> None:
        """Maps the allocation `handle`, which is released if that fails."""
        self.device = device
        self.length = length
        self._handle = handle
        self._writable = writable
        with on_error(partial(call, "cuMemRelease", handle)):
            self.base = self._map()

    @classmethod
    def allocate(cls, device: Device, length: int) -> Self:
        """New memory of `length` bytes, a multiple of `granule`, with whatever bytes it has.

        Raises:
            DeviceError: the driver refused, `CUDA_ERROR_OUT_OF_MEMORY` for want of memory.

        """
        with device.current():
            return cls(device, call("cuMemCreate", length, _properties(device), 0), length, writable=True)

    @classmethod
    def map_descriptor(cls, device: Device, descriptor: int, length: int, *, writable: bool) -> Self:
        """The memory behind the descriptor of an export, which stays the caller's, for access by `device`.

        The memory may be another GPU's of this host, if the two reach each other (P2P).

        Raises:
            DeviceError: it is no export, has fewer than `length` bytes, or `device` does not reach it.

        """
        with device.current():
            handle = call("cuMemImportFromShareableHandle", descriptor, _handle_type())
            return cls(device, handle, length, writable=writable)

    def export(self) -> int:
        """A new descriptor of the memory."""
        descriptor = int(call("cuMemExportToShareableHandle", self._handle, _handle_type(), 0))
        os.set_inheritable(descriptor, False)
        return descriptor

    def is_pinned_here(self) -> bool:
        """Whether the allocation is ordinary memory of this mapping's GPU."""
        found = call("cuMemGetAllocationPropertiesFromHandle", self._handle)
        wanted = _properties(self.device)
        return bool(
            (found.type, found.location.type, found.location.id)
            == (wanted.type, wanted.location.type, wanted.location.id)
        )

    def zero(self) -> None:
        """Zeroes all bytes; returns when that is done."""
        with self.device.current(), Stream(self.device) as stream:
            stream.zero(self.base, self.length)
            stream.synchronize()

    def read(self, offset: int, size: int) -> bytes:
        """A few bytes."""
        found = ctypes.create_string_buffer(size)
        with self.device.current(), Stream(self.device) as stream:
            call("cuMemcpyDtoHAsync", ctypes.addressof(found), self.base + offset, size, stream.handle)
            stream.synchronize()
        return found.raw

    def write(self, offset: int, content: bytes) -> None:
        """Overwrites a few bytes."""
        with self.device.current(), Stream(self.device) as stream:
            call("cuMemcpyHtoDAsync", self.base + offset, content, len(content), stream.handle)
            stream.synchronize()

    def move(self) -> None:
        """Maps the memory at another address too, then replaces it by zeros, for good, at the old one.

        The transport may still read there for a peer; without a mapping that would end this process's context.

        Raises:
            DeviceError: there is no memory for the zeros, or the driver refused.

        """
        step = granule(self.device)
        zeros = Mapping.allocate(self.device, step)
        zeros.zero()
        with self.device.current(), contextlib.closing(zeros):
            base = self._map()
            old, self.base = self.base, base
            call("cuMemUnmap", old, self.length)
            for address in range(old, old + self.length, step):
                call("cuMemMap", address, step, 0, zeros._handle, 0)
            call("cuMemSetAccess", old, self.length, [_access(self.device, writable=False)], 1)

    def close(self) -> None:
        """Unmaps and releases; a second call does nothing. What uses the memory must have ended."""
        if not self.length:
            return
        length, self.length = self.length, 0
        with self.device.current(), contextlib.ExitStack() as steps:
            steps.callback(call, "cuMemRelease", self._handle)
            steps.callback(call, "cuMemAddressFree", self.base, length)
            steps.callback(call, "cuMemUnmap", self.base, length)

    def _map(self) -> int:
        base = int(call("cuMemAddressReserve", self.length, 0, 0, 0))
        with on_error(partial(call, "cuMemAddressFree", base, self.length)):
            call("cuMemMap", base, self.length, 0, self._handle, 0)
            with on_error(partial(call, "cuMemUnmap", base, self.length)):
                call("cuMemSetAccess", base, self.length, [_access(self.device, writable=self._writable)], 1)
        return base


def granule(device: Device) -> int:
    """Allocations of the GPU are multiples of this many bytes."""
    least = api().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(call("cuMemGetAllocationGranularity", _properties(device), least))


def _properties(device: Device) -> Any:
    driver = api()
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device.ordinal
    properties.requestedHandleTypes = _handle_type()  # no fabric handles: those need an IMEX domain, and may fail
    properties.allocFlags.gpuDirectRDMACapable = device.attribute("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED")
    return properties


def _handle_type() -> Any:
    return api().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _access(device: Device, *, writable: bool) -> Any:
    driver = api()
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device.ordinal
    flags = driver.CUmemAccess_flags
    access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    return access


@cache
def export_kind(device: Device) -> tuple[int, int]:
    """What an export of this driver looks like: open /dev/nvidiactl. Tried out, so that we know that it works."""
    mapping = Mapping.allocate(device, granule(device))
    try:
        descriptor = mapping.export()
    finally:
        mapping.close()
    try:
        return foreign.kind(descriptor)
    finally:
        os.close(descriptor)


def check_export(device: Device, descriptor: int) -> None:
    """Checks that a descriptor that came from elsewhere may be an export; the driver would ask any file for its memory.

    Raises:
        BadRequest: `BAD_POOL`, it is another kind of file.

    """
    kind, own = foreign.kind(descriptor), export_kind(device)
    if kind != own:
        text = f"the descriptor is of file type {kind[0]:#o}, device {kind[1]:#x}, this driver's exports are of "
        text += f"{own[0]:#o}, {own[1]:#x}: give back the one that kvd lent"
        raise refusal(ErrorCode.BAD_POOL, text)


_MARK: Final = struct.Struct("<8sQ16s")
_MAGIC: Final = b"kvd pool"
MARK_BYTES: Final = _MARK.size


def mark(memory: Mapping, size: int) -> None:
    """Marks the memory as a new pool of `size` bytes, unlike any other."""
    memory.write(memory.length - MARK_BYTES, _MARK.pack(_MAGIC, size, os.urandom(16)))


def read_mark(memory: Mapping) -> bytes:
    """The last bytes of the memory; those of two mappings are the same only if they are of one pool."""
    return memory.read(memory.length - MARK_BYTES, MARK_BYTES)


def is_pool(memory: Mapping, size: int) -> bool:
    """Whether the memory is a pool of `size` bytes that has not ended."""
    magic, marked, _ = _MARK.unpack(read_mark(memory))
    return (magic, marked) == (_MAGIC, size)
