"""Memory of a GPU between processes, and copies in it."""

import os
import signal
import socket

import numpy as np
import pytest

from kvd.cuda import copies
from kvd.cuda.device import Stream, device
from kvd.cuda.memory import Mapping, granule
from kvd.errors import DeviceError, InternalError
from tests.standin.driver import live, work
from tests.support.gpu import over_standin

MIB = 1 << 20
LENGTH = 4 * MIB


def words(*values):
    return np.array(values, dtype=np.uint64)


@over_standin()
def test_memory_can_be_mapped_from_its_descriptor_after_its_maker_was_killed():
    ours, theirs = socket.socketpair()
    maker = os.fork()  # before the driver is loaded: it does not survive a fork
    if maker == 0:
        memory = Mapping.allocate(device(0), LENGTH)
        memory.zero()
        memory.write(LENGTH - 4, b"last")
        socket.send_fds(theirs, [b"x"], [memory.export()])
        signal.pause()
    _, (descriptor,), _, _ = socket.recv_fds(ours, 1, 1)
    os.kill(maker, signal.SIGKILL)
    os.waitpid(maker, 0)
    memory = Mapping.map_descriptor(device(0), descriptor, LENGTH, writable=False)
    os.close(descriptor)
    assert memory.read(LENGTH - 8, 8) == b"\0\0\0\0last"
    assert memory.is_pinned_here()
    memory.close()


@over_standin()
def test_a_descriptor_is_not_inherited():
    memory = Mapping.allocate(device(0), LENGTH)
    descriptor = memory.export()
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    memory.close()


@over_standin()
def test_more_than_the_memory_behind_a_descriptor_is_not_mapped():
    memory = Mapping.allocate(device(0), LENGTH)
    descriptor = memory.export()
    with pytest.raises(DeviceError, match="cuMemMap: CUDA_ERROR_"):
        Mapping.map_descriptor(device(0), descriptor, 2 * LENGTH, writable=False)
    os.close(descriptor)
    memory.close()


@over_standin()
def test_memory_that_moves_keeps_its_bytes_and_leaves_zeros():
    memory = Mapping.allocate(device(0), LENGTH)
    memory.zero()
    memory.write(LENGTH - 4, b"kept")
    old = memory.base
    memory.move()
    assert memory.base != old
    assert memory.read(LENGTH - 4, 4) == b"kept"
    assert memory.read(old - memory.base + LENGTH - 4, 4) == bytes(4)
    memory.close()
    memory.close()  # does nothing


@over_standin()
def test_all_memory_is_zeroed():
    memory = Mapping.allocate(device(0), LENGTH)
    memory.zero()
    assert memory.read(0, LENGTH) == bytes(LENGTH)
    memory.close()


@over_standin()
def test_allocations_are_whole_granules():
    assert granule(device(0)) == 2 * MIB
    with pytest.raises(DeviceError, match="cuMemCreate: CUDA_ERROR_INVALID_VALUE"):
        Mapping.allocate(device(0), 2 * MIB + 1)


def check_copies():
    """Copies scattered words from one pool to another one, which is written through another mapping."""
    gpu, count = device(0), 1000
    source, target = Mapping.allocate(gpu, LENGTH), Mapping.allocate(gpu, LENGTH)
    content = np.random.default_rng(7).integers(0, 256, LENGTH, dtype=np.uint8)
    source.write(0, content.tobytes())
    target.zero()
    order = np.random.default_rng(8).permutation(count).astype(np.uint64)
    froms, tos = order * np.uint64(64), np.arange(count, dtype=np.uint64) * np.uint64(64)
    with gpu.current():
        stream = Stream(gpu)
        copies.copy(stream, tos + np.uint64(target.base), froms + np.uint64(source.base), np.full(count, 64, np.uint64))
        stream.synchronize()
        stream.close()
    landed = np.frombuffer(target.read(0, 64 * count), np.uint8).reshape(count, 64)
    assert (landed == content[: 64 * count].reshape(count, 64)[order.astype(int)]).all()
    source.close()
    target.close()


@over_standin()
def test_many_copies_land_where_they_should_by_one_call():
    assert copies._batch_call() is not None
    check_copies()


@over_standin(driver_version=12080)
def test_many_copies_land_by_one_call_also_in_the_form_of_the_first_driver_that_had_it():
    assert copies.has_batches()
    check_copies()
    assert work()["batches"] == 1


@over_standin(driver_version=12070)
def test_many_copies_land_where_they_should_though_an_older_driver_has_no_batches():
    assert copies._batch_call() is None
    check_copies()


@over_standin(hold=2)
def test_a_stream_is_idle_only_after_what_was_put_in_is_done():
    gpu = device(0)
    memory = Mapping.allocate(gpu, LENGTH)
    with gpu.current(), Stream(gpu) as stream:
        stream.zero(memory.base, LENGTH)
        assert not stream.is_idle()
        stream.synchronize()
        assert stream.is_idle()
    memory.close()


@over_standin(device_count=2)
def test_a_gpu_copies_from_the_memory_of_another_one():
    ours, theirs = device(1), Mapping.allocate(device(0), LENGTH)
    theirs.write(64, b"theirs")
    descriptor = theirs.export()
    imported = Mapping.map_descriptor(ours, descriptor, LENGTH, writable=False)
    os.close(descriptor)
    assert not imported.is_pinned_here()
    target = Mapping.allocate(ours, LENGTH)
    with ours.current(), Stream(ours) as stream:
        copies.copy(stream, words(target.base), words(imported.base + 64), words(6))
        stream.synchronize()
    assert target.read(0, 6) == b"theirs"
    for mapping in (target, imported, theirs):
        mapping.close()


@over_standin()
def test_pinned_host_memory_is_copied_to_and_from_a_gpu():
    gpu = device(0)
    memory = Mapping.allocate(gpu, LENGTH)
    host = np.arange(3 * 4096, dtype=np.uint64).view(np.uint8)
    first = int(-(-host.ctypes.data // 4096) * 4096)
    skipped = first - host.ctypes.data
    copies.pin(gpu, first, 2 * 4096, writable=True)
    with gpu.current(), Stream(gpu) as stream:
        copies.copy(stream, words(memory.base), words(first), words(4096))
        copies.copy(stream, words(first + 4096), words(memory.base), words(4096))
        stream.synchronize()
    copies.unpin(gpu, first)
    assert memory.read(0, 4096) == host[skipped : skipped + 4096].tobytes()
    assert (host[skipped : skipped + 4096] == host[skipped + 4096 : skipped + 8192]).all()
    memory.close()


@over_standin()
def test_copies_whose_arrays_differ_in_length_are_refused_and_none_is_nothing():
    gpu = device(0)
    with gpu.current(), Stream(gpu) as stream:
        with pytest.raises(InternalError, match="2 targets, 1 sources and 1 lengths"):
            copies.copy(stream, words(1, 2), words(1), words(1))
        copies.copy(stream, words(), words(), words())


@over_standin()
def test_pinning_what_is_not_mapped_is_refused_by_name():
    with pytest.raises(DeviceError, match="cuMemHostRegister: CUDA_ERROR_"):
        copies.pin(device(0), 1 << 40, 4096, writable=True)


@over_standin(device_count=1)  # a GPU counts nothing
def test_nothing_of_the_driver_is_left_but_the_zeros_where_memory_has_moved_from():
    gpu = device(0)
    memory = Mapping.allocate(gpu, LENGTH)
    memory.zero()
    descriptor = memory.export()
    mapped = Mapping.map_descriptor(gpu, descriptor, LENGTH, writable=True)
    with pytest.raises(DeviceError):
        Mapping.map_descriptor(gpu, descriptor, 2 * LENGTH, writable=True)
    os.close(descriptor)
    for mapping in (memory, mapped):
        mapping.close()
    assert set(live().items()) == {(name, int(name == "contexts")) for name in live()}
    memory = Mapping.allocate(gpu, LENGTH)
    memory.move()
    memory.close()
    left = live()
    assert (left["handles"], left["mappings"], left["reservations"], left["streams"]) == (0, 2, 1, 0)
