import ctypes

from tests.standin.calls import (
    FD,
    GRANULE,
    MIB,
    READ,
    READ_WRITE,
    access,
    cu,
    do,
    error,
    memory,
    place,
    prop,
    read,
    start,
    write,
)
from tests.standin.children import run, succeed
from tests.standin.driver import live


def test_fresh_memory_is_not_zero_and_keeps_what_is_written(standin):
    def child():
        start()
        mine = memory(4 * MIB)
        assert read(mine.address, 4 * MIB) == b"\xa5" * (4 * MIB)
        write(mine.address + 5, b"hello")
        assert read(mine.address + 4, 7) == b"\xa5hello\xa5"

    succeed(standin, child)


def test_nothing_is_left_after_all_was_given_back(standin):
    def child():
        device = start()
        mine = memory()
        stream, event = do(cu.cuStreamCreate, 0), do(cu.cuEventCreate, 0)
        held = live()
        assert held.pop("registrations") == 0
        assert set(held.values()) == {1}
        mine.close()
        do(cu.cuStreamDestroy, stream)
        do(cu.cuEventDestroy, event)
        do(cu.cuDevicePrimaryCtxRelease, device)
        assert set(live().values()) == {0}

    assert succeed(standin, child) == ""


def test_sizes_are_multiples_of_the_granularity(standin):
    def child():
        start()
        granularity = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        assert do(cu.cuMemGetAllocationGranularity, prop(), granularity) == GRANULE
        handle = do(cu.cuMemCreate, GRANULE, prop(), 0)
        address = int(do(cu.cuMemAddressReserve, 2 * GRANULE, 0, 0, 0))
        assert error(cu.cuMemCreate, GRANULE + 4096, prop(), 0) == "INVALID_VALUE"
        assert error(cu.cuMemCreate, 0, prop(), 0) == "INVALID_VALUE"
        assert error(cu.cuMemAddressReserve, GRANULE - 1, 0, 0, 0) == "INVALID_VALUE"
        assert error(cu.cuMemMap, address, MIB, 0, handle, 0) == "INVALID_VALUE"
        assert error(cu.cuMemMap, address + MIB, GRANULE, 0, handle, 0) == "INVALID_VALUE"
        assert error(cu.cuMemMap, address, GRANULE, MIB, handle, 0) == "INVALID_VALUE"

    succeed(standin, child)


def test_a_mapping_is_as_long_as_its_object_and_no_longer_than_its_reservation(standin):
    def child():
        start()
        handle, larger = (do(cu.cuMemCreate, size, prop(), 0) for size in (GRANULE, 2 * GRANULE))
        address = int(do(cu.cuMemAddressReserve, 2 * GRANULE, 0, 0, 0))
        assert error(cu.cuMemMap, address, 2 * GRANULE, 0, handle, 0) == "NOT_SUPPORTED"
        assert error(cu.cuMemMap, address, GRANULE, 0, larger, 0) == "NOT_SUPPORTED"
        assert error(cu.cuMemMap, address + 2 * GRANULE, GRANULE, 0, handle, 0) == "INVALID_VALUE"
        do(cu.cuMemMap, address + GRANULE, GRANULE, 0, handle, 0)
        assert error(cu.cuMemMap, address + GRANULE, GRANULE, 0, handle, 0) == "ALREADY_MAPPED"

    assert "4194304 bytes are not the 2097152 of the object" in succeed(standin, child)


def test_mappings_and_reservations_are_given_back_whole_and_in_order(standin):
    def child():
        start()
        mine = memory(2 * GRANULE)
        assert error(cu.cuMemUnmap, mine.address, GRANULE) == "INVALID_VALUE"
        assert error(cu.cuMemAddressFree, mine.address, mine.size) == "INVALID_VALUE"
        do(cu.cuMemUnmap, mine.address, mine.size)
        assert error(cu.cuMemUnmap, mine.address, mine.size) == "INVALID_VALUE"
        assert error(cu.cuMemAddressFree, mine.address, GRANULE) == "INVALID_VALUE"

    succeed(standin, child)


def test_a_handle_is_of_no_use_after_its_release_but_its_mapping_is(standin):
    def child():
        start()
        mine = memory()
        do(cu.cuMemRelease, mine.handle)
        write(mine.address, b"still there")
        assert error(cu.cuMemRelease, mine.handle) == "INVALID_VALUE"
        assert error(cu.cuMemExportToShareableHandle, mine.handle, FD, 0) == "INVALID_VALUE"
        again = do(cu.cuMemRetainAllocationHandle, mine.address)
        assert read(place(again, GRANULE), 11) == b"still there"

    assert "was released" in succeed(standin, child)


def test_what_was_created_without_descriptors_cannot_be_exported(standin):
    def child():
        start()
        handle = do(cu.cuMemCreate, GRANULE, prop(handles=cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE), 0)
        assert error(cu.cuMemExportToShareableHandle, handle, FD, 0) == "INVALID_VALUE"
        fabric = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
        assert error(cu.cuMemCreate, GRANULE, prop(handles=fabric), 0) == "NOT_PERMITTED"

    succeed(standin, child)


def test_memory_tells_its_place_device_and_rights(standin):
    def child():
        start()
        mine = memory()
        attribute = cu.CUpointer_attribute
        base, size = do(cu.cuMemGetAddressRange, mine.address + 5)
        assert (int(base), size) == (mine.address, GRANULE)
        assert do(cu.cuPointerGetAttribute, attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, mine.address) == 0
        assert (
            do(cu.cuPointerGetAttribute, attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, mine.address) == 0
        )
        where = access(READ).location
        assert do(cu.cuMemGetAccess, where, mine.address) == int(READ_WRITE)
        do(cu.cuMemSetAccess, mine.address, GRANULE, [access(READ)], 1)
        assert do(cu.cuMemGetAccess, where, mine.address) == int(READ)
        created = do(cu.cuMemGetAllocationPropertiesFromHandle, mine.handle)
        assert (created.location.id, created.requestedHandleTypes, created.allocFlags.gpuDirectRDMACapable) == (
            0,
            FD,
            1,
        )
        assert error(cu.cuMemGetAddressRange, mine.address + GRANULE) == "NOT_FOUND"

    succeed(standin, child)


def test_the_cpu_cannot_touch_device_memory_unless_a_test_plays_the_kernels(standin):
    def child():
        start()
        mine = memory()
        ctypes.memset(mine.address, 7, 4096)
        assert read(mine.address, 4097) == b"\x07" * 4096 + b"\xa5"

    assert run(standin, child).returncode == -11
    standin.set(cpu_visible=1)
    succeed(standin, child)
