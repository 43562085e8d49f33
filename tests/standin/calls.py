"""CUDA's driver API in few words, for the tests of the stand-in."""

import ctypes
from dataclasses import dataclass
from importlib import resources

from cuda.bindings import driver as cu

MIB = 1 << 20
GRANULE = 2 * MIB
FD = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
READ = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
READ_WRITE = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
NON_BLOCKING = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
NO_TIMING = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING


class Refused(Exception):
    """The name of the error that a call returned, without `CUDA_ERROR_`."""


def do(function, *arguments):
    """What a call returns besides its result. Raises Refused."""
    result, *values = function(*arguments)
    if result != cu.CUresult.CUDA_SUCCESS:
        raise Refused(result.name.removeprefix("CUDA_ERROR_"))
    return values[0] if len(values) == 1 else values


def error(function, *arguments) -> str:
    """The name of the error that a call must return."""
    try:
        do(function, *arguments)
    except Refused as refused:
        return str(refused)
    return "SUCCESS"


def start(ordinal=0):
    """A device with its context current to this thread."""
    do(cu.cuInit, 0)
    device = do(cu.cuDeviceGet, ordinal)
    do(cu.cuCtxSetCurrent, do(cu.cuDevicePrimaryCtxRetain, device))
    return device


def prop(ordinal=0, handles=FD):
    """What to ask cuMemCreate for."""
    wanted = cu.CUmemAllocationProp()
    wanted.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = ordinal
    wanted.requestedHandleTypes = handles
    wanted.allocFlags.gpuDirectRDMACapable = 1
    return wanted


def access(flags, ordinal=0):
    """What to give cuMemSetAccess."""
    wanted = cu.CUmemAccessDesc()
    wanted.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = ordinal
    wanted.flags = flags
    return wanted


def place(handle, size, flags=READ_WRITE, ordinal=0) -> int:
    """Maps all of a handle's memory and opens it to the device; its address."""
    address = int(do(cu.cuMemAddressReserve, size, 0, 0, 0))
    do(cu.cuMemMap, address, size, 0, handle, 0)
    do(cu.cuMemSetAccess, address, size, [access(flags, ordinal)], 1)
    return address


@dataclass
class Memory:
    """Device memory in one mapping."""

    size: int
    handle: object
    address: int

    def close(self):
        do(cu.cuMemUnmap, self.address, self.size)
        do(cu.cuMemAddressFree, self.address, self.size)
        do(cu.cuMemRelease, self.handle)

    def export(self) -> int:
        return int(do(cu.cuMemExportToShareableHandle, self.handle, FD, 0))


def memory(size=GRANULE, ordinal=0) -> Memory:
    handle = do(cu.cuMemCreate, size, prop(ordinal), 0)
    return Memory(size, handle, place(handle, size, ordinal=ordinal))


def imported(descriptor, size=GRANULE, flags=READ) -> Memory:
    handle = do(cu.cuMemImportFromShareableHandle, descriptor, FD)
    return Memory(size, handle, place(handle, size, flags))


def write(address, data: bytes):
    """From the host; waits until it is there."""
    do(cu.cuMemcpyHtoD, address, data, len(data))


def read(address, size) -> bytes:
    data = bytearray(size)
    do(cu.cuMemcpyDtoH, data, address, size)
    return bytes(data)


def batch(stream, to, sources, sizes):
    """One cuMemcpyBatchAsync; what it returns."""
    attributes = cu.CUmemcpyAttributes()
    attributes.srcAccessOrder = cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    pointers = [[cu.CUdeviceptr(address) for address in addresses] for addresses in (to, sources)]
    return cu.cuMemcpyBatchAsync(*pointers, sizes, len(sizes), [attributes], [0], 1, stream)


def kernel():
    """kvd's own, loaded."""
    text = resources.files("kvd.cuda").joinpath("copy.ptx").read_bytes() + b"\0"
    return do(cu.cuModuleGetFunction, do(cu.cuModuleLoadData, text), b"kvd_copy")


def table(*rows):
    """Pinned host memory with these rows."""
    address = int(do(cu.cuMemHostAlloc, 24 * len(rows), 0))
    words = (ctypes.c_uint64 * (3 * len(rows))).from_address(address)
    words[:] = [word for row in rows for word in row]
    return address, words


def launch(function, stream, address, count):
    """Of the kernel, over a table at `address`; what it returns."""
    return cu.cuLaunchKernel(function, count, 1, 1, 256, 1, 1, 0, stream, ((address,), (ctypes.c_void_p,)), 0)


def settle(ready, *arguments):
    """Polls until `ready` returns something other than NOT_READY, which is returned."""
    while (answer := error(ready, *arguments)) == "NOT_READY":
        pass
    return answer


def text_of(error_number: int) -> tuple[str, str]:
    name = do(cu.cuGetErrorName, cu.CUresult(error_number))
    text = do(cu.cuGetErrorString, cu.CUresult(error_number))
    return name.decode(), text.decode()


def host(size=4096):
    """Memory of the host that stays at its address, and the address."""
    buffer = ctypes.create_string_buffer(size)
    return buffer, ctypes.addressof(buffer)
