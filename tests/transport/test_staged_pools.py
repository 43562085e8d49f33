"""Each pool on a GPU has an arena of its own: who may read one pool learns nothing of another, nor holds it up."""

import asyncio
import itertools
import json

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvd import limits
from kvd.errors import NoMemory
from kvd.transport.interface import (
    Deregistered,
    Described,
    Landed,
    ReadFailed,
    ReadRequest,
    Region,
    Registered,
    RegisterFailed,
)
from kvd.transport.staged import messages
from kvd.transport.staged.messages import State, Wanted, heading, tag
from kvd.transport.staged.transport import BUFFERS
from tests.conformance.site import Reader, blocks, pattern
from tests.transport.staged_site import Producer, StagedSite

SIZE = limits.MIB


class TwoPools:
    """A producer with two pools on its GPU, and a reader of each, which was told of that one alone."""

    async def open(self, site):
        self.site = site
        self.producer = await site.producer(SIZE, 1)
        self.events, self.transport = self.producer.events, self.producer.end.transport
        _, other = await self.producer.register_more(SIZE, 2)
        self.bases = [self.producer.base, other]
        self.told = [await self.describe(number) for number in (1, 2)]
        self.readers = [await self.reader(metadata) for metadata in self.told]
        return self

    async def describe(self, *pools):
        self.transport.describe(pools)
        event = await self.events.get()
        assert isinstance(event, Described)
        assert event.pools == pools
        return event.metadata

    async def reader(self, metadata):
        base, memory, _ = self.site.memory(SIZE)
        reader = Reader(self.site.transport(), Region(base, SIZE), memory)
        reader.transport.start(reader.on_event)
        reader.transport.register(1, reader.region)
        self.producer.metadata = metadata
        await reader.add(self.producer)
        return reader

    def read(self, reader, pool):
        self.producer.base = self.bases[pool]
        return reader.read(self.producer, blocks(0, 16, 64 * limits.KIB))

    def arena(self, pool):
        return self.producer.end.arena_of(pool + 1)


@pytest.fixture
async def two():
    return await TwoPools().open(StagedSite(source=True, target=False))


def registrations(metadata):
    """The addresses that a peer is told of."""
    return {place[1] for place in json.loads(messages.metadata(metadata).network)[1]}


async def test_two_pools_with_one_reader_each_are_read_at_the_same_time(two):
    reads = [two.read(two.readers[pool], pool) for pool in (0, 1)]
    for pool in (0, 1):
        end = await two.readers[pool].end(reads[pool])
        assert isinstance(end, Landed), end
        assert np.array_equal(two.readers[pool].memory, pattern(pool + 1, SIZE))


async def test_a_peer_is_told_of_the_arenas_of_the_pools_that_it_may_read_and_of_no_buffers(two):
    assert [registrations(metadata) for metadata in two.told] == [{two.arena(0).base}, {two.arena(1).base}]
    tokens = [messages.metadata(metadata).staged for metadata in two.told]
    assert [list(staged) for staged in tokens] == [[two.bases[0]], [two.bases[1]]]
    assert registrations(await two.describe()) == set()
    assert registrations(two.transport.metadata) == {two.arena(0).base, two.arena(1).base}


async def test_a_peer_without_the_right_to_a_pool_gets_no_byte_of_it_whatever_address_and_token_it_makes_up(two):
    thief, honest = two.readers
    mine, theirs = (messages.metadata(told).staged[base] for told, base in zip(two.told, two.bases, strict=True))
    made_up = messages.StagedPool(mine.token, SIZE, theirs.arena, theirs.lines)
    thief.transport._peers[two.producer.agent].learn({two.bases[0]: mine, two.bases[1]: made_up})
    end = await thief.end(two.read(thief, 1))
    assert isinstance(end, ReadFailed)
    assert "not in the metadata" in end.reason
    assert not thief.memory.any()
    assert isinstance(await honest.end(two.read(honest, 1)), Landed)


async def test_a_request_under_one_pool_s_token_is_served_from_that_pool_alone(two):
    """Of what lies beyond its end nothing is copied, though the next pool may lie there."""
    [mine], [theirs] = (messages.metadata(told).staged.values() for told in two.told)
    beyond = np.array([SIZE, 64], np.uint64).tobytes()
    two.transport._served.hear("thief", Wanted(b"s" * 16, 1, mine.token, beyond))
    boards = [two.arena(pool).memory.content[: messages.BOARD_BYTES].tobytes() for pool in (0, 1)]
    assert tag(b"s" * 16, 1, State.REFUSED) in boards[0]
    assert boards[1] == heading(theirs.token).ljust(messages.BOARD_BYTES, b"\0")
    assert two.producer.end.gpu.copies == 0


async def test_readers_of_one_pool_keep_no_window_from_those_of_another_under_however_many_secrets(two):
    [mine] = messages.metadata(two.told[0]).staged.values()
    table = np.array([0, 64], np.uint64).tobytes()
    for number in range(10 * limits.MAX_STAGED_REQUESTS):
        two.transport._served.hear("thief", Wanted(number.to_bytes(16), 1, mine.token, table))
    windows = two.producer.end.windows_of(1)
    assert (windows.in_use, windows.waiting) == (two.arena(0).windows, limits.MAX_STAGED_REQUESTS)
    end = await two.readers[1].end(two.read(two.readers[1], 1))
    assert isinstance(end, Landed), end


async def test_an_arena_is_gone_with_its_pool_and_the_other_one_stays(two):
    arenas = two.producer.end.gpu.arenas
    assert sorted(arenas) == sorted(two.arena(pool).base for pool in (0, 1))
    two.transport.deregister(1)
    assert isinstance(await two.events.get(), Deregistered)
    assert arenas == [two.arena(1).base]
    assert registrations(two.transport.metadata) == {two.arena(1).base}
    assert isinstance(await two.readers[0].end(two.read(two.readers[0], 0)), ReadFailed)
    assert isinstance(await two.readers[1].end(two.read(two.readers[1], 1)), Landed)


async def test_an_arena_is_freed_only_once_the_gpu_copies_nothing_into_it(two):
    gpu = two.producer.end.gpu
    gpu.held = True
    read = two.read(two.readers[0], 0)
    while not two.producer.end.windows_of(1).in_use:  # noqa: ASYNC110
        await asyncio.sleep(0)
    two.transport.deregister(1)
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(gpu.arenas) == 2
    gpu.held = False
    gpu.work()
    assert isinstance(await two.events.get(), Deregistered)
    assert len(gpu.arenas) == 1
    assert isinstance(await two.readers[0].end(read), ReadFailed)


async def test_a_pool_that_is_registered_anew_is_served_under_another_token_and_not_under_the_old_one(two):
    """As when a right was withdrawn: who was told of the pool before gets no bytes, also where nobody checks keys."""
    two.site.fabric.faults.blank = True
    two.transport.deregister(1)
    await two.events.get()
    two.transport.register(1, two.producer.end.region(two.bases[0], SIZE))
    await two.events.get()
    copies = two.producer.end.gpu.copies
    end = await two.readers[0].end(two.read(two.readers[0], 0))
    assert isinstance(end, ReadFailed)
    assert "has taken the pool back" in end.reason
    assert two.producer.end.gpu.copies == copies
    reader = await two.reader(await two.describe(1))
    assert isinstance(await reader.end(two.read(reader, 0)), Landed)


async def test_buffers_that_were_refused_once_are_there_for_the_next_peer_and_the_log_has_the_reason():
    site = StagedSite(source=False, target=True)
    producer = await site.producer(SIZE, 1)
    base, memory, _ = site.memory(SIZE)
    reader = Reader(site.transport(), Region(base, SIZE), memory)
    network, refusals = reader.transport._end.network, [RegisterFailed(BUFFERS, "none left")]
    register = network.register

    def refuse_once(pool, region):
        if pool == BUFFERS and refusals:
            network._soon(network._emit, refusals.pop())
        else:
            register(pool, region)

    network.register = refuse_once
    with capture_logs() as logged:
        reader.transport.start(reader.on_event)
        reader.transport.register(1, reader.region)
        await reader.answer(Registered)
    assert [entry["reason"] for entry in logged] == ["none left"]
    await reader.add(producer)
    end = await reader.end(reader.read(producer, blocks(0, 16, 64 * limits.KIB)))
    assert isinstance(end, Landed), end
    assert np.array_equal(memory, pattern(1, SIZE))


# --- bounds ---------------------------------------------------------------------------------------------------------


async def opened() -> Producer:
    return await StagedSite(source=True, target=False).producer(4096, 1)


async def test_a_pool_that_is_registered_anew_keeps_its_windows_from_others():
    producer = await opened()
    end, fabric = producer.end, producer._fabric
    for number in range(2, 16):
        await producer.register_more(4096, number)
    windows = [end.arena_of(number).windows for number in range(1, 16)]
    assert sum(windows) == limits.STAGING_WINDOWS
    for number in (1, 15):
        end.transport.deregister(number, returns=True)
        assert isinstance(await producer.events.get(), Deregistered)
        end.transport.register(16, end.region(fabric.map(pattern(1, 4096)), 4096))
        assert isinstance(await producer.events.get(), RegisterFailed)
        end.transport.register(number, end.region(fabric.map(pattern(1, 4096)), 4096))
        assert isinstance(await producer.events.get(), Registered)
        assert end.arena_of(number).windows == windows[number - 1]
    assert len(end.gpu.arenas) == 15
    end.transport.deregister(15)
    assert isinstance(await producer.events.get(), Deregistered)
    end.transport.register(16, end.region(fabric.map(pattern(1, 4096)), 4096))
    assert isinstance(await producer.events.get(), Registered)


async def test_each_further_pool_gets_a_share_of_the_windows_that_are_left_and_one_too_many_is_refused():
    producer = await opened()
    end = producer.end
    for number in itertools.count(2):
        base = producer._fabric.map(pattern(number, 4096))
        end.transport.register(number, end.region(base, 4096))
        event = await producer.events.get()
        if isinstance(event, RegisterFailed):
            break
    pools = number - 1
    shares = [end.arena_of(pool).windows for pool in range(1, number)]
    assert shares[0] == limits.STAGING_WINDOWS // limits.STAGING_SHARE
    assert shares == sorted(shares, reverse=True)
    assert min(shares) == 1
    assert sum(shares) == limits.STAGING_WINDOWS
    assert f"{pools} pools have all {limits.STAGING_WINDOWS} of them (256 MiB)" in event.reason
    end.transport.deregister(1)
    await producer.events.get()
    end.transport.register(number, end.region(base, 4096))
    assert not isinstance(await producer.events.get(), RegisterFailed)
    assert end.arena_of(number).windows == shares[0] // limits.STAGING_SHARE


async def test_a_pool_for_whose_arena_there_is_no_memory_is_refused_and_leaves_nothing():
    producer = await opened()
    end = producer.end
    end.gpu.shortage = NoMemory("the host has none", 1)
    end.transport.register(2, end.region(producer.base, 4096))
    event = await producer.events.get()
    assert isinstance(event, RegisterFailed)
    assert "the host has none" in event.reason
    assert len(end.gpu.arenas) == 1
    assert list(end.transport._served._pools) == [1]


async def test_an_arena_that_the_network_does_not_register_is_given_back():
    producer = await opened()
    end = producer.end
    end.network.register = lambda pool, _region: end.network._on_event(RegisterFailed(pool, "no keys are left"))
    end.transport.register(2, end.region(producer.base, 4096))
    event = await producer.events.get()
    assert isinstance(event, RegisterFailed)
    assert (len(end.gpu.arenas), list(end.transport._served._pools)) == (1, [1])


async def test_nobody_is_told_of_a_pool_nor_served_from_it_before_its_arena_is_registered():
    producer = await opened()
    end = producer.end
    register, asked = end.network.register, []
    end.network.register = lambda *arguments: asked.append(arguments)
    base = producer._fabric.map(pattern(2, 4096))
    end.transport.register(2, end.region(base, 4096))
    while not asked:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert list(messages.metadata(end.transport.metadata).staged) == [producer.base]
    assert len(end.transport._served._by_token) == 1
    register(*asked[0])
    event = await producer.events.get()
    assert sorted(messages.metadata(event.metadata).staged) == sorted((producer.base, base))
    assert len(end.transport._served._by_token) == 2


async def test_the_buffers_that_reads_go_through_cannot_be_read_by_peers():
    """Bytes of all pools that are read lie there, and peers whose rights have ended would know of them."""
    site = StagedSite(source=True, target=True)
    two = await TwoPools().open(site)
    buffers = two.producer.end.buffers.base
    assert buffers not in registrations(two.transport.metadata)
    reader = await two.reader(two.transport.metadata)
    reader.transport.read(ReadRequest(99, two.producer.agent, reader.region.base, buffers, blocks(0, 1, 64)))
    assert isinstance(await reader.end(99), ReadFailed)
