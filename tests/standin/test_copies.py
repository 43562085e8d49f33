from tests.standin.calls import (
    GRANULE,
    NO_TIMING,
    NON_BLOCKING,
    READ_WRITE,
    access,
    batch,
    cu,
    do,
    error,
    host,
    imported,
    memory,
    prop,
    read,
    settle,
    start,
    write,
)
from tests.standin.children import succeed
from tests.standin.driver import work


def test_a_copy_lands_later_and_reads_its_source_when_it_lands(standin):
    def child():
        start()
        a, b = memory(), memory()
        stream = do(cu.cuStreamCreate, NON_BLOCKING)
        buffer, source = host()
        do(cu.cuMemcpyHtoDAsync, a.address, source, 4096, stream)
        do(cu.cuMemcpyDtoDAsync, b.address, a.address, 4096, stream)
        buffer.raw = b"x" * 4096
        landed, there = host()
        do(cu.cuMemcpyDtoHAsync, there, b.address, 4096, stream)
        assert landed.raw == b"\0" * 4096
        do(cu.cuStreamSynchronize, stream)
        assert landed.raw == b"x" * 4096

    standin.set(hold=2)
    succeed(standin, child)


def test_an_event_is_complete_after_what_was_recorded_before_it_only(standin):
    def child():
        start()
        a, b = memory(), memory()
        stream, event = do(cu.cuStreamCreate, NON_BLOCKING), do(cu.cuEventCreate, NO_TIMING)
        assert error(cu.cuEventQuery, event) == "SUCCESS", "never recorded"
        do(cu.cuMemsetD8Async, a.address, 7, GRANULE, stream)
        do(batch, stream, [b.address, b.address + 4096], [a.address, a.address + 8192], [4096, 4096])
        do(cu.cuEventRecord, event, stream)
        assert error(cu.cuEventQuery, event) == "NOT_READY"
        assert settle(cu.cuEventQuery, event) == "SUCCESS"
        assert work() == {"copies": 2, "batches": 1, "launches": 0, "bytes": 8192}
        assert read(b.address, 8193) == b"\x07" * 8192 + b"\xa5"

    standin.set(hold=2)
    succeed(standin, child)


def test_a_stream_waits_for_the_event_of_another_one_and_runs_host_functions_in_order(standin):
    def child():
        start()
        a, b = memory(), memory()
        first, second = do(cu.cuStreamCreate, NON_BLOCKING), do(cu.cuStreamCreate, NON_BLOCKING)
        filled, copied = do(cu.cuEventCreate, 0), do(cu.cuEventCreate, 0)
        do(cu.cuMemsetD32Async, a.address, 0x01020304, GRANULE // 4, first)
        do(cu.cuEventRecord, filled, first)
        do(cu.cuStreamWaitEvent, second, filled, 0)
        do(cu.cuMemcpyAsync, b.address, a.address, GRANULE, second)
        do(cu.cuEventRecord, copied, second)
        do(cu.cuEventSynchronize, copied)
        assert read(b.address, 4) == b"\4\3\2\1"
        assert do(cu.cuEventElapsedTime, filled, copied) > 0

    succeed(standin, child)


def test_the_null_stream_and_blocking_streams_wait_for_each_other_and_the_rest_do_not(standin):
    def child(flags, *seen):
        start()
        mine, stream = memory(), do(cu.cuStreamCreate, int(flags))
        do(cu.cuMemsetD8, mine.address, 1, GRANULE)
        landed, there = host(1)
        do(cu.cuMemcpyDtoHAsync, there, mine.address, 1, stream)
        do(cu.cuStreamSynchronize, stream)
        do(cu.cuMemsetD8Async, mine.address, 2, GRANULE, stream)
        assert [landed.raw.hex(), read(mine.address, 1).hex()] == list(seen)

    standin.set(hold=2)
    succeed(standin, child, "0", "01", "02")
    succeed(standin, child, str(int(NON_BLOCKING)), "a5", "01")


def test_calls_without_a_stream_wait_only_where_the_host_takes_part(standin):
    def child():
        start()
        a, b = memory(), memory()
        do(cu.cuMemcpyDtoD, b.address, a.address, GRANULE)
        assert error(cu.cuStreamQuery, cu.CUstream(0)) == "NOT_READY"
        write(a.address, b"x")
        assert error(cu.cuStreamQuery, cu.CUstream(0)) == "SUCCESS"
        do(cu.cuPointerSetAttribute, True, cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, b.address)
        do(cu.cuMemcpyDtoD, b.address, a.address, GRANULE)
        assert error(cu.cuStreamQuery, cu.CUstream(0)) == "SUCCESS"

    standin.set(hold=2)
    succeed(standin, child)


def test_a_copy_may_span_mappings_side_by_side(standin):
    def child():
        start()
        address = int(do(cu.cuMemAddressReserve, 2 * GRANULE, 0, 0, 0))
        for at in (address, address + GRANULE):
            do(cu.cuMemMap, at, GRANULE, 0, do(cu.cuMemCreate, GRANULE, prop(), 0), 0)
        do(cu.cuMemSetAccess, address, 2 * GRANULE, [access(READ_WRITE)], 1)
        write(address + GRANULE - 2, b"abcd")
        assert read(address + GRANULE - 2, 4) == b"abcd"

    succeed(standin, child)


def test_a_read_only_mapping_is_not_written_and_the_context_is_lost(standin):
    def child():
        start()
        theirs = memory()
        mine = imported(theirs.export())
        write(theirs.address, b"hello")
        assert read(mine.address, 5) == b"hello"
        assert error(cu.cuMemcpyHtoD, mine.address, b"world", 5) == "ILLEGAL_ADDRESS"
        assert error(cu.cuMemGetInfo) == "ILLEGAL_ADDRESS"

    assert "may not write" in succeed(standin, child)


def test_a_batch_goes_to_a_stream_of_ones_own_and_has_no_empty_copies(standin):
    def child():
        start()
        mine, stream = memory(), do(cu.cuStreamCreate, NON_BLOCKING)
        assert error(batch, cu.CUstream(0), [mine.address], [mine.address + 4096], [1]) == "INVALID_HANDLE"
        assert error(batch, stream, [mine.address], [mine.address + 4096], [0]) == "INVALID_VALUE"

    succeed(standin, child)


def test_pinned_host_memory_takes_part_in_batches(standin):
    def child():
        start()
        mine, stream, pinned = memory(), do(cu.cuStreamCreate, NON_BLOCKING), do(cu.cuMemHostAlloc, 4096, 0)
        do(cu.cuMemcpyDtoH, pinned, mine.address, 4096)
        do(cu.cuMemsetD8, mine.address, 0, GRANULE)
        do(cu.cuCtxSynchronize)
        do(batch, stream, [mine.address + 8192], [pinned], [4096])
        do(cu.cuStreamSynchronize, stream)
        assert read(mine.address + 8191, 2) == b"\0\xa5"
        do(cu.cuMemFreeHost, pinned)

    succeed(standin, child)
