from tests.standin.calls import (
    GRANULE,
    NO_TIMING,
    NON_BLOCKING,
    batch,
    cu,
    do,
    error,
    host,
    imported,
    memory,
    read,
    settle,
    start,
    write,
)
from tests.standin.children import abort, succeed
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

    succeed(standin, child)


def test_an_event_is_complete_after_what_was_recorded_before_it_only(standin):
    def child():
        start()
        a, b = memory(), memory()
        stream, event = do(cu.cuStreamCreate, NON_BLOCKING), do(cu.cuEventCreate, NO_TIMING)
        assert error(cu.cuEventQuery, event) == "SUCCESS", "never recorded"
        do(cu.cuMemsetD8Async, a.address, 7, GRANULE, stream)
        batch(stream, [b.address, b.address + 4096], [a.address, a.address + 8192], [4096, 4096])
        do(cu.cuEventRecord, event, stream)
        assert error(cu.cuEventQuery, event) == "NOT_READY"
        assert settle(cu.cuEventQuery, event) == "SUCCESS"
        assert work() == {"copies": 2, "batches": 1, "bytes": 8192}
        assert read(b.address, 8193) == b"\x07" * 8192 + b"\xa5"

    succeed(standin, child)


def test_memory_that_a_copy_still_uses_may_not_be_unmapped(standin):
    def child():
        start()
        a, b = memory(), memory()
        do(cu.cuMemcpyDtoDAsync, b.address, a.address, GRANULE, do(cu.cuStreamCreate, NON_BLOCKING))
        b.close()

    assert "synchronise before" in abort(standin, child)


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
