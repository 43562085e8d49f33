"""Pools in a GPU's memory: one allocation each, which workers and peers on this host import by its descriptor.

Its last bytes are the pool's mark (`kvd.cuda.memory`). Memory that others have mapped cannot be taken from them: when a
pool ends it is zeroed, and with it the mark, so that nobody adopts it again. Its pages are free once the last process
has unmapped them.
"""

import os
from functools import partial
from typing import Final

from kvd import foreign
from kvd.cuda.device import device
from kvd.cuda.memory import MARK_BYTES, Mapping, check_export, export_kind, granule, is_pool, mark
from kvd.errors import DeviceError, ErrorCode, NoMemory, on_error, refusal

_NO_EXPORT: Final = frozenset(
    f"CUDA_ERROR_{name}"
    for name in ("INVALID_VALUE", "INVALID_HANDLE", "INVALID_DEVICE", "MAP_FAILED", "NOT_SUPPORTED", "OPERATING_SYSTEM")
)
"""What the driver says of descriptors that are not its own, or of less memory than is to be mapped."""


class CudaPool:
    """A mapped allocation of a GPU (a `kvd.memory.interface.Memory`)."""

    backing: Final = "cuda"

    def __init__(self, mapping: Mapping, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.size = size
        self.device = mapping.device.uuid
        self._mapping = mapping

    @property
    def base(self) -> int:
        """Address of the first byte, of the GPU, in this process; a multiple of 2 MiB."""
        return self._mapping.base

    @property
    def length(self) -> int:
        """Bytes of the mapping, which is all of the allocation."""
        return self._mapping.length

    def move(self) -> None:
        """Maps the pool at another address, see `Memory`. Peers that imported the memory keep it."""
        try:
            self._mapping.move()
        except DeviceError as error:
            raise refusal(ErrorCode.OVERLOADED, f"the pool cannot be mapped anew: {error.text}") from error

    def close(self) -> None:
        """Unmaps and closes; a second call does nothing. The bytes live on while another process has the memory."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            self._mapping.close()

    def free(self) -> None:
        """Like `close`, and zeroes the memory first, for whoever has it mapped."""
        try:
            self._mapping.zero()
        finally:
            self.close()


class CudaProvider:
    """Makes pools on the GPU number `ordinal` (a `kvd.memory.interface.MemoryProvider`).

    Raises:
        Unavailable: `NO_DEVICE`, there is no such GPU, or it cannot share memory; the text says why and what to do.

    """

    def __init__(self, ordinal: int) -> None:
        self._device = device(ordinal)
        obstacle = self._device.obstacle()
        if obstacle:
            raise refusal(ErrorCode.NO_DEVICE, obstacle)
        self.device = self._device.uuid
        self._granule = granule(self._device)
        export_kind(self._device)  # so that a driver that exports nothing is found out now

    def footprint(self, size: int) -> int:
        """Bytes of memory that a pool of `size` bytes takes: with its mark, in whole granules (2 MiB)."""
        return -(-(size + MARK_BYTES) // self._granule) * self._granule

    def allocate(self, name: str, size: int) -> CudaPool:
        """A new pool of `size` bytes, zeroed.

        Raises:
            BadRequest: `BAD_SPEC`, the size is not positive.
            NoMemory: the GPU has too little.
            Unavailable: `NO_DEVICE`, it does not work.

        """
        if size <= 0:
            raise refusal(ErrorCode.BAD_SPEC, f"pool {name!r} of {size} bytes: a pool has at least one byte")
        length = self.footprint(size)
        try:
            mapping = Mapping.allocate(self._device, length)
        except DeviceError as error:
            if error.code is not ErrorCode.OVERLOADED:
                raise
            free, total = self._device.free_and_total()
            text = (
                f"pool {name!r} needs {length} bytes of {self._device}, {free} of {total} are free ({error.text}): "
                "stop what uses the rest, wait for `pool_linger`, or give the engine a smaller cache"
            )
            raise NoMemory(text, max(1, length - free)) from error
        with on_error(mapping.close):
            mapping.zero()
            mark(mapping, size)
            return CudaPool(mapping, mapping.export(), size)

    def adopt(self, descriptor: int, size: int) -> CudaPool:
        """The pool of `size` bytes behind `descriptor`, with its bytes. Closes `descriptor` if it refuses.

        Raises:
            BadRequest: `BAD_POOL`, it is no pool of that size on this GPU, or its pool has ended.
            Unavailable: `NO_DEVICE`, the GPU does not work.

        """
        with on_error(partial(foreign.close, (descriptor,))):
            mapping = self._import(descriptor, size)
        foreign.kept(descriptor)
        return CudaPool(mapping, descriptor, size)

    def _import(self, descriptor: int, size: int) -> Mapping:
        check_export(self._device, descriptor)
        try:
            mapping = Mapping.map_descriptor(self._device, descriptor, self.footprint(max(size, 0)), writable=True)
        except DeviceError as error:
            if error.result not in _NO_EXPORT:
                raise
            text = f"no pool of {size} bytes on {self._device} ({error.text}): give back the descriptor that kvd lent"
            raise refusal(ErrorCode.BAD_POOL, text) from error
        with on_error(mapping.close):
            self._check(mapping, size)
        return mapping

    def _check(self, mapping: Mapping, size: int) -> None:
        if not mapping.is_pinned_here():
            text = f"the memory is not on {self._device}: attach to the daemon of its GPU"
            raise refusal(ErrorCode.BAD_POOL, text)
        if not is_pool(mapping, size):
            text = f"the memory is no pool of {size} bytes, or its pool has ended meanwhile; attach without it"
            raise refusal(ErrorCode.BAD_POOL, text)
