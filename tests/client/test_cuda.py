"""A worker's pool in a GPU's memory."""

import contextlib
import ctypes
import gc
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import weakref

import pytest

from kvd.client import Reattached, Worker
from kvd.client.connection import Connection
from kvd.client.pool import dlpack
from kvd.client.pool.cuda import DevicePool
from kvd.cuda.device import device
from kvd.cuda.memory import Mapping
from kvd.errors import BadRequest, ErrorCode, Unavailable
from kvd.memory.provider import provider_for
from tests.client.conftest import ScriptedDaemon, Spec
from tests.support.gpu import over_standin

SIZE = 5 << 20


def lent():
    """The daemon's pool and the worker's."""
    pool = provider_for("cuda:0").allocate("w", SIZE)
    return pool, DevicePool(os.dup(pool.descriptor), pool.device, pool.size, pool.length)


@over_standin()
def test_the_worker_and_the_daemon_have_the_same_bytes():
    pool, mine = lent()
    pool._mapping.write(5, b"daemon")
    address = mine.view.pointer
    seen = Mapping.map_descriptor(device(0), mine.descriptor, pool.length, writable=False)
    assert seen.read(5, 6) == b"daemon"
    assert address != pool.base
    seen.close()
    mine.close()
    pool.close()


@over_standin()
def test_frameworks_get_a_pointer_and_its_length():
    pool, mine = lent()
    interface = mine.view.__cuda_array_interface__
    assert interface["shape"] == (SIZE,)
    assert interface["typestr"] == "|u1"
    assert interface["data"] == (mine.view.pointer, False)
    assert mine.view.__dlpack_device__() == (2, 0)
    assert mine.view.device == pool.device
    mine.close()
    pool.close()


@over_standin()
def test_memory_stays_mapped_until_the_last_array_on_it_is_gone():
    unmapped = []
    close = Mapping.close
    Mapping.close = lambda mapping: (unmapped.append(mapping), close(mapping))
    pool, mine = lent()
    unmapped.clear()
    array = mine.view
    mine.close()
    gc.collect()
    assert not unmapped
    assert array.pointer
    del array
    gc.collect()
    assert len(unmapped) == 1
    pool.close()


def consume(capsule):
    """What a framework does with a capsule: takes the structure over and renames the capsule."""
    managed = dlpack._Managed.from_address(dlpack._pointer(id(capsule), b"dltensor"))
    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = (ctypes.py_object, ctypes.c_char_p)
    assert rename(capsule, b"used_dltensor") == 0
    return managed


class Owner:
    pass


def test_a_capsule_holds_its_owner_until_its_consumer_is_done():
    owner = Owner()
    alive = weakref.ref(owner)
    capsule = dlpack.capsule(owner, 0x7000, 96, 3)
    del owner
    managed = consume(capsule)
    tensor = managed.tensor
    assert (tensor.data, tensor.device_type, tensor.device_id) == (0x7000, 2, 3)
    assert (tensor.code, tensor.bits, tensor.lanes) == (1, 8, 1)
    assert (tensor.ndim, tensor.shape[0], bool(tensor.strides), tensor.byte_offset) == (1, 96, False, 0)
    del capsule
    gc.collect()
    assert alive()
    managed.deleter(ctypes.byref(managed))
    gc.collect()
    assert alive() is None


def test_a_capsule_that_nobody_consumes_lets_go_of_its_owner():
    owner = Owner()
    alive = weakref.ref(owner)
    capsule = dlpack.capsule(owner, 0x7000, 96, 3)
    del owner
    gc.collect()
    assert alive()
    del capsule
    gc.collect()
    assert alive() is None


@over_standin()
def test_a_pool_of_a_gpu_that_the_worker_does_not_see_is_refused():
    pool, mine = lent()
    mine.close()
    descriptor = os.dup(pool.descriptor)
    with pytest.raises(Unavailable, match="the pool is on GPU-else, which this process does not see") as caught:
        DevicePool(descriptor, "GPU-else", SIZE, pool.length)
    assert caught.value.code is ErrorCode.NO_DEVICE
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    pool.close()


@over_standin()
def test_a_pool_that_cannot_be_mapped_at_its_length_is_refused():
    pool, mine = lent()
    mine.close()
    for size, length in ((SIZE, 2 * pool.length), (SIZE, SIZE - 1), (0, pool.length)):
        descriptor = os.dup(pool.descriptor)
        with pytest.raises(BadRequest) as caught:
            DevicePool(descriptor, pool.device, size, length)
        assert caught.value.code is ErrorCode.BAD_POOL
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    pool.close()


@over_standin()
def test_a_pool_is_known_again_by_its_descriptor():
    provider = provider_for("cuda:0")
    pool, mine = lent()
    other = provider.allocate("x", SIZE)
    assert mine.is_same(pool.descriptor)
    assert not mine.is_same(other.descriptor)
    larger = provider.allocate("y", 2 * SIZE)
    with pytest.raises(BadRequest, match="cannot be mapped"):
        DevicePool(os.dup(pool.descriptor), pool.device, 2 * SIZE, larger.length)
    with pytest.raises(BadRequest, match="cannot be mapped"):
        mine.is_same(larger.descriptor)
    larger.close()
    successor = provider.adopt(os.dup(mine.descriptor), SIZE)  # another daemon, which lends what it was given
    assert mine.is_same(successor.descriptor)
    for each in (mine, successor, other, pool):
        each.close()


DYING = """
import os, signal, sys
from kvd.client.pool.cuda import DevicePool
from kvd.cuda import device, driver, memory

left, call = int(sys.argv[1]), driver.call

def last_calls(name, *arguments):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return call(name, *arguments)

for module in (device, memory):
    module.call = last_calls
DevicePool(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
sys.exit(3)
"""


@over_standin()
def test_a_worker_that_is_killed_at_any_call_of_its_import_leaves_nothing():
    provider = provider_for("cuda:0")
    pool = provider.allocate("w", SIZE)
    pool._mapping.write(0, b"kept")
    free = device(0).free_and_total()
    arguments = [str(pool.descriptor), pool.device, str(pool.size), str(pool.length)]
    for calls in itertools.count():
        command = [sys.executable, "-c", DYING, str(calls), *arguments]
        ended = subprocess.run(command, check=False, pass_fds=(pool.descriptor,), timeout=60)
        assert device(0).free_and_total() == free
        if ended.returncode == 3:
            break
        assert ended.returncode == -signal.SIGKILL
    assert calls > 8
    successor = provider.adopt(os.dup(pool.descriptor), SIZE)
    assert successor._mapping.read(0, 4) == b"kept"
    successor.close()
    pool.free()


@contextlib.contextmanager
def daemon_of(path, provider, incarnation=1):
    daemon = ScriptedDaemon(path, incarnation, provider=provider)
    try:
        yield daemon
    finally:
        daemon.stop()


@over_standin()
def test_a_worker_has_a_gpus_pool_across_a_restart_of_its_daemon():
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = f"{folder}/kvd.sock"
        with daemon_of(path, provider_for("cuda:0")) as daemon:
            worker = stack.enter_context(Worker.attach(path, name="w", spec=Spec()))
            assert worker.backing == "cuda"
            assert worker.device == device(0).uuid
            with pytest.raises(BadRequest, match=f"the pool is in the memory of {worker.device}; use `device_pool`"):
                len(worker.pool)
            address = worker.device_pool.pointer
            daemon.pools["w"]._mapping.write(9, b"kept")
        with daemon_of(path, provider_for("cuda:0"), incarnation=2) as daemon:
            while not any(isinstance(event, Reattached) for event in worker.wait(30)):
                pass
            assert worker.kept
            assert worker.device_pool.pointer == address
            assert daemon.pools["w"]._mapping.read(9, 4) == b"kept"
            worker.close()
            with pytest.raises(BadRequest, match="the worker is closed"):
                worker.device_pool  # noqa: B018


@over_standin()
def test_a_worker_that_does_not_see_the_gpu_is_told_at_once():
    provider = provider_for("cuda:0")
    allocate = provider.allocate
    provider.allocate = lambda name, size: moved(allocate(name, size))
    closed, discard = [], Connection.discard
    Connection.discard = lambda connection, number: (closed.append(link(number)), discard(connection, number))
    with (
        tempfile.TemporaryDirectory() as folder,
        daemon_of(f"{folder}/kvd.sock", provider) as daemon,
        pytest.raises(Unavailable, match="the pool is on GPU-elsewhere, which this process does not see"),
    ):
        Worker.attach(daemon.path, name="w", spec=Spec(), timeout=60)
    assert ["pidfd" in name for name in closed] == [True], "that of the daemon's process, which came along"


def moved(pool):
    pool.device = "GPU-elsewhere"
    return pool


def link(number):
    return os.readlink(f"/proc/self/fd/{number}")


def test_a_pool_in_host_memory_is_no_device_pool(daemon, socket_path):
    with Worker.attach(socket_path, name="w", spec=Spec()) as worker:
        assert worker.device == ""
        with pytest.raises(BadRequest, match="the pool is in host memory; use `pool`"):
            worker.device_pool  # noqa: B018
