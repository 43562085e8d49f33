import os
import signal
import socket
import subprocess
from contextlib import contextmanager

import pytest

from tests.standin.calls import (
    FD,
    GRANULE,
    NON_BLOCKING,
    batch,
    cu,
    do,
    error,
    imported,
    memory,
    prop,
    read,
    start,
    write,
)
from tests.standin.children import environment, program, run, succeed


def creates():
    """Sends the descriptor of memory that it wrote, then waits to be killed."""
    start()
    mine = memory()
    write(mine.address, bytes(range(256)) * 16)
    with socket.socket(fileno=0) as link:
        socket.send_fds(link, [b"x"], [mine.export()])
        link.recv(1)


@contextmanager
def creator(standin):
    """A process that has created memory, and the descriptor that it has sent."""
    ours, theirs = socket.socketpair()
    with ours, subprocess.Popen(program(creates), env=environment(standin), stdin=theirs) as process:
        theirs.close()
        ours.settimeout(60)
        _, (descriptor,), _, _ = socket.recv_fds(ours, 1, 1)
        try:
            yield process, descriptor
        finally:
            os.close(descriptor)
            process.kill()


@pytest.mark.parametrize("alive", [True, False])
def test_an_importer_reads_what_the_creator_wrote_also_after_it_was_killed(standin, alive):
    def child(descriptor):
        start()
        theirs, mine = imported(int(descriptor)), memory()
        stream, event = do(cu.cuStreamCreate, NON_BLOCKING), do(cu.cuEventCreate, 0)
        places = range(0, 4096, 1024)
        do(
            batch,
            stream,
            [mine.address + 3072 - at for at in places],
            [theirs.address + at for at in places],
            [1024] * 4,
        )
        do(cu.cuEventRecord, event, stream)
        do(cu.cuEventSynchronize, event)
        assert read(mine.address, 4096) == bytes(range(256)) * 16

    with creator(standin) as (process, descriptor):
        if not alive:
            process.send_signal(signal.SIGKILL)
            process.wait()
        ended = run(standin, child, str(descriptor), pass_fds=(descriptor,))
        assert ended.returncode == 0, ended.stderr


def test_an_importer_cannot_map_more_than_the_object(standin):
    def child(descriptor):
        start()
        handle = do(cu.cuMemImportFromShareableHandle, int(descriptor), FD)
        assert do(cu.cuMemGetAllocationPropertiesFromHandle, handle).location.id == 0
        address = do(cu.cuMemAddressReserve, 2 * GRANULE, 0, 0, 0)
        assert error(cu.cuMemMap, address, 2 * GRANULE, 0, handle, 0) == "NOT_SUPPORTED"

    with creator(standin) as (_, descriptor):
        ended = run(standin, child, str(descriptor), pass_fds=(descriptor,))
        assert ended.returncode == 0, ended.stderr


def test_descriptors_that_are_no_export_or_lack_rights_are_refused(standin):
    def child():
        start()
        foreign = os.memfd_create("kv")
        os.truncate(foreign, GRANULE)
        assert error(cu.cuMemImportFromShareableHandle, foreign, FD) == "INVALID_VALUE"
        assert error(cu.cuMemImportFromShareableHandle, 999, FD) == "INVALID_VALUE"
        exported = memory().export()
        only_read = os.open(f"/proc/self/fd/{exported}", os.O_RDONLY)
        assert error(cu.cuMemImportFromShareableHandle, only_read, FD) == "NOT_PERMITTED"

    assert "is no export of memory of a device" in succeed(standin, child)


def test_what_any_process_holds_is_no_longer_free_for_the_others_until_the_last_lets_go(standin):
    def child(held, *descriptors):
        start()
        free, total = do(cu.cuMemGetInfo)
        assert total - free == int(held)
        assert error(cu.cuMemCreate, total, prop(), 0) == ("OUT_OF_MEMORY" if int(held) else "SUCCESS")

    standin.set(total_memory=2 * GRANULE)
    with creator(standin) as (process, _):
        succeed(standin, child, str(GRANULE))
        process.kill()
        process.wait()
        succeed(standin, child, str(GRANULE))
    succeed(standin, child, "0")


def test_memory_of_cumemalloc_dies_with_its_maker(standin):
    def child():
        start()
        legacy = do(cu.cuMemAlloc, 4096)
        write(legacy, b"hello")
        assert read(legacy, 5) == b"hello"
        handle = do(cu.cuIpcGetMemHandle, legacy)
        assert error(cu.cuIpcOpenMemHandle, handle, 1) == "INVALID_CONTEXT"
        assert error(cu.cuIpcGetMemHandle, memory().address) == "INVALID_VALUE"
        do(cu.cuMemFree, legacy)
        assert error(cu.cuMemFree, legacy) == "INVALID_VALUE"

    succeed(standin, child)
