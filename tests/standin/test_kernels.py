"""The one kernel that the stand-in knows, and what a GPU would do to those who misuse it."""

import ctypes

from tests.standin.calls import (
    GRANULE,
    NON_BLOCKING,
    cu,
    do,
    error,
    kernel,
    launch,
    memory,
    read,
    settle,
    start,
    table,
    write,
)
from tests.standin.children import abort, succeed
from tests.standin.driver import work


def test_a_kernel_reads_its_table_and_copies_when_it_runs(standin):
    def child():
        start()
        a, b = memory(), memory()
        write(a.address, b"x" * 32 + b"y" * 32)
        before = work()
        stream = do(cu.cuStreamCreate, NON_BLOCKING)
        rows, words = table((b.address, a.address, 32), (b.address + 64, a.address, 16))
        do(launch, kernel(), stream, rows, 2)
        words[4] = a.address + 32
        assert settle(cu.cuStreamQuery, stream) == "SUCCESS"
        done = {name: count - before[name] for name, count in work().items()}
        assert done == {"copies": 2, "batches": 0, "launches": 1, "bytes": 48}
        assert read(b.address, 80) == b"x" * 32 + b"\xa5" * 32 + b"y" * 16

    standin.set(hold=2)
    succeed(standin, child)


def test_a_kernel_that_touches_what_it_must_not_loses_the_context(standin):
    def child(kind):
        start()
        a, b = memory(), memory()
        there = ctypes.create_string_buffer(64)
        row = {
            "misaligned": (b.address, a.address + 8, 16),
            "beyond the end": (b.address, a.address + GRANULE, 16),
            "unregistered": (b.address, ctypes.addressof(there) // 16 * 16 + 16, 16),
        }[kind]
        stream = do(cu.cuStreamCreate, NON_BLOCKING)
        do(launch, kernel(), stream, table(row)[0], 1)
        name = "MISALIGNED_ADDRESS" if kind == "misaligned" else "ILLEGAL_ADDRESS"
        assert error(cu.cuStreamSynchronize, stream) == name
        assert error(cu.cuMemAlloc, 16) == name

    for kind in ("misaligned", "beyond the end", "unregistered"):
        succeed(standin, child, kind)


def test_memory_and_a_table_that_a_kernel_may_still_use_are_not_taken_away(standin):
    def child(what):
        start()
        a, b = memory(), memory()
        stream = do(cu.cuStreamCreate, NON_BLOCKING)
        rows, _ = table((b.address, a.address, 16))
        do(launch, kernel(), stream, rows, 1)
        if what == "memory":
            cu.cuMemUnmap(a.address, GRANULE)
        else:
            cu.cuMemFreeHost(rows)

    standin.set(hold=1)
    for what in ("memory", "table"):
        assert "a kernel is not complete" in abort(standin, child, what)


def test_other_kernels_and_no_compiler_are_errors(standin):
    def child():
        start()
        assert error(cu.cuModuleLoadData, b".visible .entry other()\0") == "INVALID_PTX"
        module = do(cu.cuModuleLoadData, b".visible .entry kvd_copy(.param .u64 table)\0")
        assert error(cu.cuModuleGetFunction, module, b"other") == "NOT_FOUND"

    def without():
        start()
        assert error(cu.cuModuleLoadData, b".visible .entry kvd_copy(.param .u64 table)\0") == "JIT_COMPILER_NOT_FOUND"

    succeed(standin, child)
    standin.set(no_compiler=1)
    succeed(standin, without)
