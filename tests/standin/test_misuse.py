"""What a driver answers to those who break its rules, and where the stand-in aborts as a GPU would go on silently."""

import mmap
import os

import numpy as np

from tests.standin.calls import GRANULE, NON_BLOCKING, cu, do, error, host, memory, place, prop, start
from tests.standin.children import abort, succeed


def test_nothing_works_before_cuinit(standin):
    def child():
        assert error(cu.cuDeviceGetCount) == "NOT_INITIALIZED"
        assert error(cu.cuMemCreate, GRANULE, prop(), 0) == "NOT_INITIALIZED"

    assert "cuInit was not called" in succeed(standin, child)


def test_nothing_works_in_a_process_that_was_forked_from_one_that_uses_cuda(standin):
    def child():
        start()
        forked = os.fork()
        if not forked:
            os._exit(error(cu.cuInit, 0) != "NOT_INITIALIZED" or error(cu.cuDeviceGetCount) != "NOT_INITIALIZED")
        assert os.waitpid(forked, 0)[1] == 0

    assert "was forked" in succeed(standin, child)


def test_streams_and_copies_need_a_current_context(standin):
    def child():
        start()
        mine = memory()
        context = do(cu.cuCtxPopCurrent)
        assert error(cu.cuStreamCreate, 0) == "INVALID_CONTEXT"
        assert error(cu.cuMemcpyDtoD, mine.address, mine.address + 4096, 4096) == "INVALID_CONTEXT"
        assert error(cu.cuCtxPopCurrent) == "INVALID_CONTEXT"
        do(cu.cuMemCreate, GRANULE, prop(), 0)
        do(cu.cuCtxPushCurrent, context)
        do(cu.cuStreamCreate, 0)

    assert "no context is current" in succeed(standin, child)


def test_a_context_that_all_released_is_of_no_use(standin):
    def child():
        device = start()
        do(cu.cuDevicePrimaryCtxRetain, device)
        do(cu.cuDevicePrimaryCtxRelease, device)
        stream = do(cu.cuStreamCreate, 0)
        do(cu.cuDevicePrimaryCtxRelease, device)
        assert error(cu.cuStreamQuery, stream) == "CONTEXT_IS_DESTROYED"
        assert error(cu.cuDevicePrimaryCtxRelease, device) == "INVALID_CONTEXT"
        assert do(cu.cuDevicePrimaryCtxGetState, device) == [0, 0]

    succeed(standin, child)


def test_a_stream_of_another_device_is_refused(standin):
    def child():
        start(0)
        stream, event = do(cu.cuStreamCreate, NON_BLOCKING), do(cu.cuEventCreate, 0)
        start(1)
        assert error(cu.cuStreamSynchronize, stream) == "INVALID_HANDLE"
        assert error(cu.cuEventRecord, event, do(cu.cuStreamCreate, NON_BLOCKING)) == "INVALID_HANDLE"

    standin.set(device_count=2)
    assert "of different contexts" in succeed(standin, child)


def test_what_was_never_a_stream_an_event_or_a_handle_is_refused(standin):
    def child():
        start()
        assert error(cu.cuStreamQuery, cu.CUstream(0x1234)) == "INVALID_HANDLE"
        assert error(cu.cuEventQuery, cu.CUevent(0x1234)) == "INVALID_HANDLE"
        assert error(cu.cuMemRelease, 0x1234) == "INVALID_VALUE"

    succeed(standin, child)


def test_a_destroyed_stream_aborts_who_uses_it(standin):
    def child():
        start()
        stream = do(cu.cuStreamCreate, NON_BLOCKING)
        do(cu.cuStreamDestroy, stream)
        do(cu.cuStreamQuery, stream)

    assert "cuStreamQuery: stream" in abort(standin, child)


def test_a_destroyed_event_aborts_who_uses_it(standin):
    def child():
        start()
        event = do(cu.cuEventCreate, 0)
        do(cu.cuEventDestroy, event)
        do(cu.cuEventQuery, event)

    assert "was destroyed" in abort(standin, child)


def test_memory_that_a_copy_still_uses_may_not_be_unmapped(standin):
    def child():
        start()
        a, b = memory(), memory()
        do(cu.cuMemcpyDtoDAsync, b.address, a.address, GRANULE, do(cu.cuStreamCreate, NON_BLOCKING))
        b.close()

    standin.set(hold=2)
    assert "cuMemUnmap: a copy from" in abort(standin, child)


def test_host_memory_that_a_copy_still_uses_may_not_be_unregistered(standin):
    def child():
        start()
        _, address = host(1 << 16)
        do(cu.cuMemHostRegister, address, 1 << 16, 0)
        do(cu.cuMemcpyHtoDAsync, memory().address, address, 4096, do(cu.cuStreamCreate, NON_BLOCKING))
        do(cu.cuMemHostUnregister, address)

    standin.set(hold=2)
    assert "cuMemHostUnregister: a copy from" in abort(standin, child)


def test_a_context_with_work_to_do_may_not_be_released(standin):
    def child():
        device = start()
        do(cu.cuMemsetD8Async, memory().address, 0, GRANULE, do(cu.cuStreamCreate, NON_BLOCKING))
        do(cu.cuDevicePrimaryCtxRelease, device)

    standin.set(hold=2)
    assert "before a stream's work was done" in abort(standin, child)


def test_host_memory_is_registered_once_and_only_where_it_is_mapped(standin):
    def child():
        start()
        _, address = host(1 << 16)
        do(cu.cuMemHostRegister, address, 1 << 16, 0)
        assert error(cu.cuMemHostRegister, address + 4096, 4096, 0) == "HOST_MEMORY_ALREADY_REGISTERED"
        assert int(do(cu.cuMemHostGetDevicePointer, address, 0)) == address
        do(cu.cuMemHostUnregister, address)
        assert error(cu.cuMemHostUnregister, address) == "HOST_MEMORY_NOT_REGISTERED"
        assert error(cu.cuMemHostRegister, 1 << 46, 4096, 0) == "INVALID_VALUE"

    succeed(standin, child)


def test_host_memory_that_may_only_be_read_is_registered_so_and_not_written(standin):
    def child():
        start()
        file = os.memfd_create("pages")
        os.truncate(file, 4096)
        pages = np.frombuffer(mmap.mmap(file, 4096, prot=mmap.PROT_READ), np.uint8)
        address = pages.ctypes.data
        assert error(cu.cuMemHostRegister, address, 4096, 0) == "INVALID_VALUE"
        do(cu.cuMemHostRegister, address, 4096, cu.CU_MEMHOSTREGISTER_READ_ONLY)
        mine = memory()
        do(cu.cuMemcpyHtoD, mine.address, address, 4096)
        assert error(cu.cuMemcpyDtoH, address, mine.address, 4096) == "ILLEGAL_ADDRESS"

    succeed(standin, child)


def test_addresses_that_are_not_the_devices_are_refused_by_the_calls_that_want_such(standin):
    def child():
        start()
        mine = memory()
        _, there = host()
        assert error(cu.cuMemcpyDtoD, mine.address, there, 4096) == "INVALID_VALUE"
        assert error(cu.cuMemcpyHtoD, mine.address, mine.address + 4096, 4096) == "INVALID_VALUE"
        assert error(cu.cuMemcpyDtoD, mine.address, mine.address + GRANULE - 1, 2) == "INVALID_VALUE"
        assert error(cu.cuMemsetD8, there, 0, 4096) == "INVALID_VALUE"
        do(cu.cuMemUnmap, mine.address, mine.size)
        assert error(cu.cuMemsetD8, mine.address, 0, 4096) == "INVALID_VALUE"

    assert "is not wholly mapped" in succeed(standin, child)


def test_memory_without_access_loses_the_context_of_who_touches_it(standin):
    def child():
        start()
        handle = do(cu.cuMemCreate, GRANULE, prop(), 0)
        none = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE
        address, stream = place(handle, GRANULE, none), do(cu.cuStreamCreate, NON_BLOCKING)
        do(cu.cuMemsetD8Async, address, 0, 4096, stream)
        assert error(cu.cuStreamSynchronize, stream) == "ILLEGAL_ADDRESS"
        assert error(cu.cuStreamCreate, 0) == "ILLEGAL_ADDRESS"

    assert "did not allow it" in succeed(standin, child)
