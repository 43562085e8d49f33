"""The order in which a GPU's copies, the end of a read and the look at its stamp come."""

import asyncio
import ctypes
import os
import tempfile
import threading
from queue import Queue
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

import kvd.cuda.device
from kvd import limits
from kvd.cuda import copies, driver
from kvd.cuda.copies import pin
from kvd.cuda.device import device
from kvd.cuda.memory import Mapping
from kvd.errors import BadRequest, DeviceError, ErrorCode
from kvd.limits import KIB
from kvd.memory.cuda import CudaProvider
from kvd.memory.memfd import MemfdProvider
from kvd.plan import Descriptors
from kvd.protocol.export import ExportedPool
from kvd.transport.interface import Deregistered, Landed, PeerAdded, PeerFailed, ReadRequest, Region, TransportDied
from kvd.transport.samehost.copies import CopyThreads, Memory, Read
from kvd.transport.samehost.devices import Devices
from kvd.transport.samehost.gpu import Gpu
from kvd.transport.samehost.transport import SameHostTransport
from tests.standin.driver import live, work
from tests.support.gpu import over_standin
from tests.support.patience import MOMENT

LENGTH = 2 << 20
ONE, ALL = np.zeros(1, np.uint64), np.full(1, LENGTH, np.uint64)


def pools():
    """The two sides of a read: one of 7s, one of zeros."""
    source, target = (Mapping.allocate(device(0), LENGTH) for _ in range(2))
    source.write(0, b"\7" * LENGTH)
    target.zero()
    return source, target


def last_byte(memory):
    """What the CPU sees, without a word to the GPU, which would begin to copy then."""
    return ctypes.c_uint8.from_address(memory.base + LENGTH - 1).value


@over_standin(hold=2, cpu_visible=1)
def test_copies_have_landed_when_the_call_returns():
    source, target = pools()
    gpu = Gpu(device(0).uuid)
    gpu.copy(ONE + np.uint64(target.base), ONE + np.uint64(source.base), ALL)
    assert last_byte(target) == 7


@over_standin(hold=2, cpu_visible=1)
def test_the_stamp_is_looked_at_after_the_last_byte_has_landed():
    source, target = pools()
    gpu, events = Gpu(device(0).uuid), Queue()
    sides = [Memory(memory.base, LENGTH, device(0).uuid) for memory in (source, target)]
    request = ReadRequest(1, "peer", target.base, source.base, Descriptors(ONE, ONE, ALL), stamp=8)
    threads = CopyThreads(1, events.put)
    threads.start()
    threads.add(Read(request, *sides, lambda _address: last_byte(target), gpu.copy))
    ended = events.get(timeout=MOMENT)
    threads.stop()
    assert isinstance(ended, Landed), ended
    assert ended.stamp == 7


@over_standin(hold=1)
def test_a_read_does_not_end_if_the_driver_cannot_tell_whether_its_bytes_have_landed_but_the_transport_does():
    def call(name, *arguments):
        if name in ("cuStreamSynchronize", "cuCtxPopCurrent"):
            raise DeviceError(ErrorCode.NO_DEVICE, f"{name}: unknown", "CUDA_ERROR_UNKNOWN")
        return driver.call(name, *arguments)

    gpu, memory, events = Gpu(device(0).uuid), Memory(0, LENGTH, device(0).uuid), Queue()
    for copy in (gpu.copy, gpu.copy_within):
        source, target = (Mapping.allocate(device(0), LENGTH) for _ in range(2))
        sides = [msgspec.structs.replace(memory, address=side.base) for side in (source, target)]
        threads = CopyThreads(1, events.put)
        threads.start()
        with patch.object(kvd.cuda.device, "call", call):
            request = ReadRequest(1, "peer", target.base, source.base, Descriptors(ONE, ONE, ALL))
            threads.add(Read(request, *sides, lambda _address: 0, copy))
            ended = events.get(timeout=MOMENT)
            threads.stop()
        assert isinstance(ended, TransportDied), ended
        assert "may still land" in ended.reason
        assert events.empty()


def random_copies(unit):
    """Addresses in a source and in a target of `LENGTH`, and lengths, all multiples of `unit`; most are small."""
    rng = np.random.default_rng(7)
    places = rng.choice(LENGTH // (4 * KIB), 200, replace=False).astype(np.uint64) * np.uint64(4 * KIB)
    lengths = rng.integers(1, 4 * KIB // unit, 200).astype(np.uint64) * np.uint64(unit)
    return rng.permutation(places), np.sort(places), lengths


def copied(offsets, targets, lengths, content):
    """What a target of zeros holds then."""
    expected = np.zeros(LENGTH, np.uint8)
    for source, target, length in zip(offsets.tolist(), targets.tolist(), lengths.tolist(), strict=True):
        expected[target : target + length] = content[source : source + length]
    return expected.tobytes()


def check_copies(offsets, targets, lengths):
    """Copies within a GPU; every byte is compared, those outside, too."""
    source, target = pools()
    content = np.random.default_rng(1).integers(1, 255, LENGTH, np.uint8)
    source.write(0, content.tobytes())
    gpu = Gpu(device(0).uuid)
    for _ in range(2):  # the table is used again
        gpu.copy_within(targets + np.uint64(target.base), offsets + np.uint64(source.base), lengths)
    assert target.read(0, LENGTH) == copied(offsets, targets, lengths, content)
    gpu.close()


@over_standin()
def test_copies_within_gpus_are_one_launch_whatever_their_lengths():
    before = work()["launches"]
    check_copies(*random_copies(16))
    check_copies(ONE, ONE, ALL)  # cut for the kernel
    assert work()["launches"] - before == 4
    assert live()["registrations"] == 0, "the table was given back"


@over_standin()
def test_copies_within_gpus_that_are_no_multiples_of_16_bytes_are_the_drivers():
    check_copies(*random_copies(3))
    assert (work()["launches"], work()["batches"]) == (0, 2)


@over_standin(no_compiler=1)
def test_without_a_compiler_copies_within_gpus_are_the_drivers_and_the_log_says_so():
    with capture_logs() as logged:
        check_copies(*random_copies(16))
    assert ["no kernel copies within GPUs" in entry["event"] for entry in logged] == [True]
    assert (work()["launches"], work()["batches"]) == (0, 2)


@over_standin()
def test_the_kernel_copies_between_gpus_and_the_call_from_and_to_the_host_in_slices_of_their_own():
    devices, uuid = Devices(device(0).uuid), device(0).uuid
    gpu, other, host = Memory(1 << 40, LENGTH, uuid), Memory(1 << 41, LENGTH, "GPU-other"), Memory(1 << 20, LENGTH)
    read = Descriptors(ONE, ONE, ALL)
    ways = [devices.copy_between(*sides, read) for sides in ((gpu, gpu), (other, gpu), (gpu, host), (host, gpu))]
    most = limits.GPU_SLICE_DESCRIPTORS
    assert [(copy.__func__, bounds) for copy, bounds in ways] == [
        (Gpu.copy_within, (limits.GPU_SLICE_BYTES, most)),
        (Gpu.copy_within, (limits.GPU_PEER_SLICE_BYTES, most)),
        (Gpu.copy, None),
        (Gpu.copy, None),
    ]


def read_within(descriptors):
    """Reads by a thread within a GPU; returns how that ended, and what the driver did."""
    devices, events = Devices(device(0).uuid), Queue()
    source, target = pools()
    sides = [Memory(memory.base, LENGTH, device(0).uuid) for memory in (source, target)]
    request = ReadRequest(1, "peer", target.base, source.base, descriptors)
    threads, before = CopyThreads(1, events.put), work()
    threads.start()
    threads.add(Read(request, *sides, lambda _address: 0, *devices.copy_between(*sides, descriptors)))
    ended = events.get(timeout=MOMENT)
    threads.stop()
    devices.close()
    return ended, {name: count - before[name] for name, count in work().items()}


def blocks_of(length):
    """More than a usual slice has."""
    at = np.arange(2 * limits.SLICE_DESCRIPTORS, dtype=np.uint64) * np.uint64(KIB)
    return Descriptors(at, at, np.full(len(at), length, np.uint64))


@over_standin()
def test_what_no_kernel_takes_is_copied_in_the_usual_slices_as_each_block_takes_the_driver_long():
    assert read_within(blocks_of(16))[1]["launches"] == 1
    ended, done = read_within(blocks_of(15))
    assert isinstance(ended, Landed), ended
    assert (done["launches"], done["batches"]) == (0, 2)


@over_standin(no_compiler=1)
def test_without_a_compiler_reads_within_gpus_are_copied_in_the_usual_slices():
    ended, done = read_within(blocks_of(16))
    assert isinstance(ended, Landed), ended
    assert (done["launches"], done["batches"]) == (0, 2)


@over_standin()
def test_without_memory_for_a_table_copies_within_gpus_are_the_drivers_and_the_log_says_so():
    def call(name, *arguments):
        if name == "cuMemHostAlloc":
            raise DeviceError(ErrorCode.OVERLOADED, "cuMemHostAlloc: none left", "CUDA_ERROR_OUT_OF_MEMORY")
        return driver.call(name, *arguments)

    with patch.object(copies, "call", call), capture_logs() as logged:
        check_copies(*random_copies(16))
    assert [entry["reason"] for entry in logged if "no table" in entry["event"]] == ["cuMemHostAlloc: none left"]
    assert (work()["launches"], work()["batches"]) == (0, 2)


@over_standin()
def test_what_a_peer_lends_is_checked_to_be_an_export_before_the_driver_asks_it_anything():
    gpu, asked = Gpu(device(0).uuid), []
    Mapping.map_descriptor = lambda *_, **__: asked.append(1)
    pool = ExportedPool(bytes(8), LENGTH, LENGTH, device(0).uuid)
    for descriptor, kind in ((os.open("/dev/null", os.O_RDONLY), "0o20000, device 0x103"), (os.pipe()[0], "0o10000")):
        with pytest.raises(BadRequest, match=f"of file type {kind}"):
            gpu.map_pool(pool, descriptor)
    assert not asked


def lend_to_a_host_pool():
    """A transport with a pool on the GPU, another with one in host memory that adds it, and the events of that."""
    folder, events = tempfile.mkdtemp(), asyncio.Queue()
    loop = asyncio.get_running_loop()
    common = {"host": "here", "threads": 1}
    producer = SameHostTransport("p#1", loop, f"{folder}/p.pools", device=device(0).uuid, **common)
    consumer = SameHostTransport("d#1", loop, f"{folder}/d.pools", **common)
    producer.start(lambda _: None)
    consumer.start(events.put_nowait)
    lent = CudaProvider(0).allocate("lent", LENGTH)
    producer.register(1, Region(lent.base, lent.size, lent.descriptor, lent.device, lent.length))
    pool = MemfdProvider().allocate("own", LENGTH)
    consumer.register(1, Region(pool.base, pool.size, pool.descriptor, length=pool.length))
    consumer.add_peer("p#1", producer.metadata)
    return producer, consumer, events


async def heard(events, kind):
    async with asyncio.timeout(MOMENT):
        while not isinstance(event := await events.get(), kind):
            pass
    return event


async def registrations(count):
    async with asyncio.timeout(MOMENT):
        while live()["registrations"] != count:  # noqa: ASYNC110 - only the driver tells
            await asyncio.sleep(0.01)


@over_standin()
def test_a_host_pool_is_pinned_while_a_peer_has_pools_on_a_gpu_and_unpinned_before_it_may_be_unmapped():
    async def check():
        producer, consumer, events = lend_to_a_host_pool()
        await heard(events, PeerAdded)
        await registrations(1)
        consumer.deregister(1)
        await heard(events, Deregistered)
        assert live()["registrations"] == 0
        late = MemfdProvider().allocate("late", LENGTH)
        consumer.register(2, Region(late.base, late.size, late.descriptor, length=late.length))
        consumer.deregister(2)
        await heard(events, Deregistered)
        assert live()["registrations"] == 0
        consumer.stop()
        producer.stop()

    asyncio.run(check())


@over_standin()
def test_a_peers_host_pool_is_pinned_when_the_peer_is_added_already_and_unpinned_before_it_is_unmapped():
    async def check():
        go_on, folder, events = threading.Event(), tempfile.mkdtemp(), asyncio.Queue()
        loop, common = asyncio.get_running_loop(), {"host": "here", "threads": 1}
        producer = SameHostTransport("p#1", loop, f"{folder}/p.pools", **common)
        consumer = SameHostTransport("d#1", loop, f"{folder}/d.pools", device=device(0).uuid, **common)
        producer.start(lambda _: None)
        consumer.start(events.put_nowait)
        lent = MemfdProvider().allocate("lent", LENGTH)
        producer.register(1, Region(lent.base, lent.size, lent.descriptor, length=lent.length))
        slowly = patch("kvd.transport.samehost.gpu.pin", lambda *at, **how: go_on.wait(MOMENT) and pin(*at, **how))
        with slowly:
            consumer.add_peer("p#1", producer.metadata)
            await heard(events, PeerAdded)
            assert live()["registrations"] == 0
            go_on.set()
            await registrations(1)
        producer.stop()
        await heard(events, PeerFailed)
        await registrations(0)
        consumer.stop()

    asyncio.run(check())


@over_standin()
def test_a_host_pool_that_the_driver_does_not_unpin_is_given_back_all_the_same_and_the_log_says_so():
    async def check():
        refused = DeviceError(ErrorCode.NO_DEVICE, "cuMemHostUnregister", "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED")
        with patch.object(Gpu, "unpin", side_effect=refused), capture_logs() as logged:
            producer, consumer, events = lend_to_a_host_pool()
            await heard(events, PeerAdded)
            consumer.deregister(1)
            await heard(events, Deregistered)
            assert [entry["exc_info"] for entry in logged if "cannot be unpinned" in entry["event"]] == [refused]
        consumer.stop()
        producer.stop()

    asyncio.run(check())


@over_standin()
def test_a_host_pool_that_cannot_be_pinned_is_used_all_the_same_and_the_log_says_so():
    async def check():
        refused = DeviceError(ErrorCode.OVERLOADED, "cuMemHostRegister: too much", "CUDA_ERROR_OUT_OF_MEMORY")
        with patch.object(Gpu, "pin", side_effect=refused), capture_logs() as logged:
            producer, consumer, events = lend_to_a_host_pool()
            await heard(events, PeerAdded)
            consumer.deregister(1)
            await heard(events, Deregistered)
        assert [entry["reason"] for entry in logged if "cannot be pinned" in entry["event"]] == [refused.text]
        consumer.stop()
        producer.stop()

    asyncio.run(check())
