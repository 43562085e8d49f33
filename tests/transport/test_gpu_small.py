"""Small reads within GPUs, which are launched on the loop: when they end, and what follows if they do not."""

import asyncio
import tempfile
import threading
from contextlib import ExitStack, asynccontextmanager
from unittest.mock import patch

import numpy as np
import pytest

import kvd.cuda.device
from kvd.cuda import copies, driver
from kvd.cuda.device import device
from kvd.errors import DeviceError, ErrorCode
from kvd.limits import KIB
from kvd.memory.cuda import CudaProvider
from kvd.plan import Descriptors
from kvd.transport.interface import (
    Answered,
    Landed,
    PeerAdded,
    PeerFailed,
    ReadFailed,
    ReadRequest,
    Region,
    TransportDied,
)
from kvd.transport.samehost import launches
from kvd.transport.samehost.copies import CopyThreads
from kvd.transport.samehost.gpu import SmallCopies
from kvd.transport.samehost.importer import ImportedPools
from kvd.transport.samehost.transport import SameHostTransport
from tests.standin.driver import change, live, work
from tests.support.gpu import over_standin
from tests.support.patience import MOMENT

LENGTH = 2 << 20
BLOCK = 16 * KIB
PATIENT = patch.object(launches, "_LOOKING", MOMENT)
"""The loop waits for the GPU, and so for no thread."""
HASTY = patch.object(launches, "_LOOKING", 0.0)
"""A thread waits for the GPU."""


class Sides:
    """A transport with a pool of 7s on the GPU, and one of zeros that reads from it."""

    def __init__(self) -> None:
        folder, loop = tempfile.mkdtemp(), asyncio.get_running_loop()
        common = {"host": "here", "threads": 1, "device": device(0).uuid}
        self.events = asyncio.Queue()
        self.producer = SameHostTransport("p#1", loop, f"{folder}/p.pools", **common)
        self.consumer = SameHostTransport("d#1", loop, f"{folder}/d.pools", **common)
        self.producer.start(lambda _: None)
        self.consumer.start(self.events.put_nowait)
        self.source, self.target = (CudaProvider(0).allocate(name, LENGTH) for name in ("source", "target"))
        for side, pool in ((self.producer, self.source), (self.consumer, self.target)):
            side.register(1, Region(pool.base, pool.size, pool.descriptor, pool.device, pool.length))
        self.source._mapping.write(0, b"\7" * LENGTH)
        self.consumer.add_peer("p#1", self.producer.metadata)

    def read(self, number, *blocks, length=BLOCK):
        offsets = np.array(blocks, np.uint64) * np.uint64(BLOCK)
        wanted = Descriptors(offsets, offsets, np.full(len(blocks), length, np.uint64))
        self.consumer.read(ReadRequest(number, "p#1", self.target.base, self.source.base, wanted, stamp=8))

    async def heard(self, kind):
        async with asyncio.timeout(MOMENT):
            while not isinstance(event := await self.events.get(), kind):
                pass
        return event

    def arrived(self):
        """The blocks that are the producer's, of those that are not all zeros."""
        blocks = np.frombuffer(self.target._mapping.read(0, LENGTH), np.uint8).reshape(-1, BLOCK)
        found = {number: set(block.tolist()) for number, block in enumerate(blocks) if block.any()}
        assert all(values == {7} for values in found.values()), found
        return list(found)


@asynccontextmanager
async def two_sides():
    """`Sides` whose stamps are the first byte of the second block that is read."""
    sides = Sides()
    await sides.heard(PeerAdded)
    with patch.object(ImportedPools, "stamp", lambda *_: 1 + sides.target._mapping.read(5 * BLOCK, 1)[0]):
        yield sides
    sides.consumer.stop()
    sides.producer.stop()
    assert sides.events.empty()


def small_reads_land():
    async def check():
        with patch.object(CopyThreads, "add", side_effect=AssertionError("a thread copies")):
            async with two_sides() as sides:
                for number in range(3):  # the table is used again
                    sides.read(number, 2, 5)
                    assert await sides.heard(Landed | ReadFailed) == Landed(number, pytest.approx(0, abs=MOMENT), 8)
                assert sides.arrived() == [2, 5]

    asyncio.run(check())


@over_standin(hold=2)
def test_a_small_read_ends_once_it_has_landed_without_a_thread():
    with PATIENT, patch.object(SmallCopies, "wait", side_effect=AssertionError("a thread waits")):
        small_reads_land()


@over_standin(hold=2)
def test_a_small_read_that_takes_long_is_waited_for_by_a_thread_and_then_its_stamp_is_looked_at():
    with HASTY:
        small_reads_land()


@over_standin(hold=0)
def test_while_a_small_read_is_copied_others_are_copied_by_threads_and_the_loop_goes_on():
    async def check():
        async with two_sides() as sides:
            change(hold=1)
            sides.read(1, 5)
            sides.read(2, 6)
            assert sides.events.empty()
            change(hold=0)
            ends = [await sides.heard(Landed | ReadFailed) for _ in range(2)]
            assert {end.read for end in ends} == {1, 2}
            assert sides.arrived() == [5, 6]

    asyncio.run(check())


@over_standin()
def test_reads_of_nothing_or_of_odd_lengths_or_outside_of_a_pool_end_as_others_do():
    async def check():
        async with two_sides() as sides:
            sides.read(1)
            sides.read(2, 5, length=0)
            sides.read(3, 5, length=17)
            assert {(await sides.heard(Landed)).read for _ in range(3)} == {1, 2, 3}
            sides.read(4, LENGTH // BLOCK)
            assert "are outside of 2097152 registered bytes" in (await sides.heard(ReadFailed)).reason
            sides.read(5, 5)
            await sides.heard(Landed)

    asyncio.run(check())


@over_standin(copy_us=300_000)
def test_a_sign_of_life_is_given_once_the_gpu_has_done_what_it_copies():
    async def check():
        async with two_sides() as sides:
            sides.read(1, 5)
            sides.consumer.ping(3)
            assert isinstance(await sides.heard(Landed | Answered), Landed)
            assert await sides.heard(Answered) == Answered(3)

    asyncio.run(check())


@over_standin(copy_us=300_000)
def test_a_transport_that_stops_or_loses_its_peer_waits_for_what_the_gpu_copies():
    async def check():
        async with two_sides() as sides:
            sides.read(1, 5)
            sides.consumer.abort(1)
            sides.consumer.remove_peer("p#1")
            assert (await sides.heard(Landed)).stamp == 8
            sides.consumer.add_peer("p#1", sides.producer.metadata)
            await sides.heard(PeerAdded)
            sides.read(2, 6)
            sides.consumer.stop()
            assert sides.arrived() == [5, 6]

    asyncio.run(check())


@over_standin(copy_us=300_000)
def test_a_read_of_a_lost_peer_does_not_land_though_the_gpu_copies_it_to_its_end():
    async def check():
        async with two_sides() as sides:
            sides.read(1, 5)
            sides.producer.stop()
            ends = [await sides.heard(PeerFailed | Landed | ReadFailed) for _ in range(2)]
            assert [type(end) for end in ends] == [PeerFailed, ReadFailed]
            assert "lost agent 'p#1'" in ends[1].reason
            assert sides.arrived() == [5]

    asyncio.run(check())


@over_standin(copy_us=300_000)
def test_nor_does_one_that_began_before_the_peers_pools_were_imported_again():
    async def check():
        async with two_sides() as sides:
            sides.read(1, 5)
            sides.consumer.add_peer("p#1", sides.producer.metadata)
            assert isinstance(await sides.heard(PeerAdded), PeerAdded)
            sides.producer.stop()
            ends = [await sides.heard(PeerFailed | Landed | ReadFailed) for _ in range(2)]
            assert [type(end) for end in ends] == [PeerFailed, ReadFailed]
            assert "lost agent 'p#1'" in ends[1].reason

    asyncio.run(check())


def failing(error, *names):
    """The driver, whose calls `names` fail."""

    def call(called, *arguments):
        if called in names:
            raise error
        return driver.call(called, *arguments)

    return call


UNKNOWN = DeviceError(ErrorCode.NO_DEVICE, "the driver cannot tell", "CUDA_ERROR_UNKNOWN")
LOST = DeviceError(ErrorCode.NO_DEVICE, "the GPU is lost", "CUDA_ERROR_LAUNCH_FAILED", lost=True)


@over_standin(hold=2)
def test_a_small_read_does_not_end_if_the_driver_cannot_tell_whether_it_has_landed_but_the_transport_does():
    async def check():
        async with two_sides() as sides:
            with HASTY, patch.object(kvd.cuda.device, "call", failing(UNKNOWN, "cuStreamSynchronize")):
                sides.read(1, 5)
                died = await sides.heard(TransportDied | Landed | ReadFailed)
                assert isinstance(died, TransportDied)
                assert "what the GPU was told may still land" in died.reason

    asyncio.run(check())


@over_standin(hold=0)
def test_a_small_read_fails_with_the_gpu_and_the_transport_ends():
    async def check():
        async with two_sides() as sides:
            change(hold=1)
            with HASTY:
                sides.read(1, 5)
            change(device_error=719)
            assert "CUDA_ERROR_LAUNCH_FAILED" in (await sides.heard(ReadFailed | Landed)).reason
            assert "CUDA_ERROR_LAUNCH_FAILED" in (await sides.heard(TransportDied)).reason

    asyncio.run(check())


@over_standin()
def test_a_small_read_that_the_driver_refuses_fails_and_the_next_one_is_copied():
    async def check():
        async with two_sides() as sides:
            with patch.object(copies, "call", failing(UNKNOWN, "cuLaunchKernel")):
                sides.read(1, 5)
                assert "the driver cannot tell" in (await sides.heard(ReadFailed | Landed)).reason
            sides.read(2, 5)
            assert isinstance(await sides.heard(ReadFailed | Landed), Landed)

    asyncio.run(check())


@over_standin(hold=0)
def test_a_small_read_that_the_driver_refuses_but_has_launched_ends_once_it_has_landed():
    def call(name, *arguments):
        result = driver.call(name, *arguments)
        if name == "cuLaunchKernel":
            raise UNKNOWN
        return result

    async def check():
        async with two_sides() as sides:
            change(hold=2)
            before = work()["copies"]
            with patch.object(copies, "call", call):
                sides.read(1, 5)
            assert "the driver cannot tell" in (await sides.heard(ReadFailed | Landed)).reason
            assert work()["copies"] == before + 1

    asyncio.run(check())


async def check_death(reason, *causes):
    """What goes wrong by `causes`, while the GPU copies, is the end of the transport and not of the read."""
    async with two_sides() as sides:
        change(hold=1)
        with ExitStack() as patches:
            for cause in causes:
                patches.enter_context(cause)
            sides.read(1, 5)
            assert reason in (await sides.heard(TransportDied | Landed | ReadFailed)).reason
        sides.consumer.stop()  # the stand-in ends a process that takes away what the GPU uses
        change(hold=0)


@over_standin(hold=0)
def test_a_small_read_does_not_end_if_the_driver_fails_when_it_is_waited_for_but_the_transport_does():
    calls = patch.object(kvd.cuda.device, "call", failing(UNKNOWN, "cuCtxPopCurrent", "cuStreamSynchronize"))
    asyncio.run(check_death("what the GPU was told may still land", HASTY, calls))


@over_standin(hold=0)
def test_a_small_read_does_not_end_if_the_driver_fails_before_it_is_asked_but_the_transport_does():
    launch, fails = SmallCopies.launch, patch.object(kvd.cuda.device, "call", failing(UNKNOWN, "cuCtxPushCurrent"))

    def launched(*arguments):
        launch(*arguments)
        fails.start()

    launches = patch.object(SmallCopies, "launch", launched)
    asyncio.run(check_death("what the GPU was told may still land", launches))


@over_standin(hold=0)
def test_whatever_is_raised_while_the_gpu_copies_is_the_end_of_the_transport():
    asyncio.run(
        check_death("ValueError: 12345", patch.object(SmallCopies, "have_landed", side_effect=ValueError(12345)))
    )


@over_standin(hold=0)
def test_where_no_thread_can_be_had_to_wait_for_the_gpu_the_transport_ends():
    none = patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
    asyncio.run(check_death("can't start new thread", HASTY, none))


@over_standin()
def test_a_gpu_that_is_lost_before_the_first_small_read_ends_the_read_and_the_transport():
    async def check():
        async with two_sides() as sides:
            with patch.object(kvd.cuda.device, "call", failing(LOST, "cuStreamCreate")):
                sides.read(1, 5)
                assert "the GPU is lost" in (await sides.heard(ReadFailed | Landed)).reason
                await sides.heard(TransportDied)

    asyncio.run(check())


@over_standin(hold=0)
def test_without_memory_for_a_table_small_reads_are_copied_by_threads_and_no_stream_is_left():
    async def check():
        none = DeviceError(ErrorCode.OVERLOADED, "none left", "CUDA_ERROR_OUT_OF_MEMORY")
        async with two_sides() as sides:
            with patch.object(copies, "call", failing(none, "cuMemHostAlloc")):
                sides.read(1, 5)
                await sides.heard(Landed)
        assert live()["streams"] == 0

    asyncio.run(check())


@over_standin(hold=2)
def test_a_small_read_ends_though_the_driver_does_not_unmap_what_it_has_read():
    async def check():
        async with two_sides() as sides:
            with HASTY, patch("kvd.cuda.memory.Mapping.close", side_effect=UNKNOWN):
                sides.read(1, 5)
                sides.consumer.remove_peer("p#1")
                await sides.heard(Landed)

    asyncio.run(check())


@over_standin(hold=2)
def test_a_sign_of_life_is_given_though_the_handler_of_the_small_reads_end_raises():
    async def check():
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        async with two_sides() as sides:

            def handle(event):
                sides.events.put_nowait(event)
                assert not isinstance(event, Landed)

            with HASTY, patch.object(sides.consumer, "_on_event", handle):
                sides.read(1, 5)
                sides.consumer.ping(3)
                assert await sides.heard(Answered) == Answered(3)

    asyncio.run(check())


@over_standin()
def test_a_transport_that_has_stopped_reads_nothing():
    async def check():
        async with two_sides() as sides:
            sides.consumer.stop()
            sides.read(1, 5)

    asyncio.run(check())
