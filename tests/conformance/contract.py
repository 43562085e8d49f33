"""Checks of what every transport must do, to be run against any implementation.

    @pytest.mark.parametrize("check", CHECKS)
    async def test_it_keeps_the_contract(check):
        await Contract(site).run(check)

A `Site` provides what the checks need of an implementation. Their only clock is the loop's.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import numpy as np

from kvd import limits
from kvd.transport.interface import Deregistered, Landed, PeerAdded, PeerFailed, ReadFailed, Region, Registered
from tests.conformance.site import PRODUCED, Producer, Reader, Site, blocks, everything, pattern, table
from tests.support.patience import MOMENT

KIB = limits.KIB
NOWHERE: Final = 8
"""An address in the first page, which no process maps."""


def _stamp(producer: Producer, offset: int) -> int:
    """What lies at an offset of a producer's stamps."""
    return int.from_bytes(pattern(producer.seed, offset + limits.STAMP_BYTES)[offset:].tobytes(), "little")


class Contract:
    """The checks, one a method; `run` runs one by its name."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def run(self, name: str) -> None:
        """Runs one of `CHECKS`; raises what it raises."""
        check: Callable[[], Awaitable[None]] = getattr(self, name)
        await check()

    @asynccontextmanager
    async def _reader(self, size: int = PRODUCED) -> AsyncIterator[Reader]:
        base, memory, descriptor = self._site.memory(size)
        reader = Reader(self._site.transport(), Region(base, size, descriptor, self._site.device, length=size), memory)
        reader.transport.start(reader.on_event)
        try:
            reader.transport.register(1, reader.region)
            registered = await reader.answer(Registered)
            assert (registered.pool, registered.metadata) == (1, reader.transport.metadata)
            yield reader
        finally:
            reader.transport.stop()

    async def adjacent_blocks_arrive_equal(self) -> None:
        """Adjacent whole blocks, in more than one slice."""
        producer = await self._site.shared()
        async with self._reader(20 * limits.MIB) as reader:
            await reader.add(producer)
            end = await reader.end(reader.read(producer, blocks(0, 72, 256 * KIB)))
            assert isinstance(end, Landed), end
            assert end.seconds > 0
            assert np.array_equal(reader.memory[: 18 * limits.MIB], pattern(producer.seed, 18 * limits.MIB))
            assert not reader.memory[18 * limits.MIB :].any()

    async def scattered_descriptors_of_odd_sizes_arrive_equal_and_touch_nothing_else(self) -> None:
        """Sizes from 0 to more than two slices, shuffled on both sides."""
        producer = await self._site.shared()
        rng = np.random.default_rng(7)
        sizes = [int(n) for n in rng.integers(0, 3000, 2000)] + [0, 1, 2 * limits.SLICE_BYTES + 5]
        starts = np.cumsum([0, *(size + 3 for size in sizes)])[:-1]
        rows = [(int(starts[i]) + 11, int(starts[i]), sizes[i]) for i in rng.permutation(len(sizes))]
        async with self._reader(16 * limits.MIB) as reader:
            await reader.add(producer)
            end = await reader.end(reader.read(producer, table(rows)))
            assert isinstance(end, Landed), end
            source, expected = pattern(producer.seed, 17 * limits.MIB), np.zeros(16 * limits.MIB, np.uint8)
            for src, dst, size in rows:
                expected[dst : dst + size] = source[src : src + size]
            assert np.array_equal(reader.memory, expected)

    async def a_read_of_nothing_lands(self) -> None:
        """No descriptors, or empty ones only."""
        producer = await self._site.shared()
        async with self._reader(4 * KIB) as reader:
            await reader.add(producer)
            for rows in ([], [(0, 0, 0)]):
                assert isinstance(await reader.end(reader.read(producer, table(rows))), Landed)

    async def every_read_ends_exactly_once(self) -> None:
        """Many at once, some aborted, some of memory that does not exist."""
        producer = await self._site.shared()
        async with self._reader(64 * limits.MIB) as reader:
            await reader.add(producer)
            reads = []
            for i in range(300):
                reads.append(reader.read(producer, blocks(i, 1 + i % 50, 16 * KIB), 64 if i % 17 == 5 else None))
                if i % 11 == 3:
                    reader.transport.abort(reads[-1])
            for read in reads:
                await reader.end(read)
            await reader.still_well(producer)
            assert [len(reader.ends(read)) for read in reads] == [1] * len(reads)
            assert all(isinstance(reader.ends(reads[i])[0], ReadFailed) for i in range(5, 300, 17))

    async def an_abort_ends_a_long_read_early_and_nothing_lands_after_that(self) -> None:
        """Rules 1 and 2."""
        producer = await self._site.shared()
        async with self._reader() as reader:
            await reader.add(producer)
            read = reader.read(producer, everything(64))
            await reader.first_byte(pattern(producer.seed, 64))
            reader.transport.abort(read)
            end = await reader.end(read)
            assert isinstance(end, ReadFailed), end
            assert end.aborted
            reader.memory[:] = 0
            await reader.still_well(producer)
            assert not reader.memory[4 * KIB :].any()
            assert len(reader.ends(read)) == 1

    async def an_abort_of_an_unknown_or_ended_read_is_ignored(self) -> None:
        """It causes no event."""
        producer = await self._site.shared()
        async with self._reader(64 * KIB) as reader:
            await reader.add(producer)
            read = reader.read(producer, blocks(0, 1, 4 * KIB))
            await reader.end(read)
            reader.transport.abort(read)
            reader.transport.abort(4711)
            await reader.still_well(producer)
            assert [type(event) for event in reader.events] == [Registered, PeerAdded, Landed, Landed]

    async def a_stamp_says_what_was_true_when_all_bytes_had_been_read(self) -> None:
        """Rule 5: a word of the peer's memory, read after a short read and after a long one."""
        producer = await self._site.shared()
        async with self._reader() as reader:
            await reader.add(producer)
            word = _stamp(producer, 4096)
            for count in (1, 1024):
                read = reader.read(producer, blocks(0, count, 256 * KIB), stamp=producer.stamps + 4096)
                end = await reader.end(read)
                assert isinstance(end, Landed), end
                assert end.stamp == (word if reader.of(PeerAdded)[0].stamps else 0)
                assert reader.memory[256 * KIB * count - 1] == pattern(producer.seed, 256 * KIB * count)[-1]
            unstamped = await reader.end(reader.read(producer, blocks(0, 1, KIB)))
            assert isinstance(unstamped, Landed)
            assert unstamped.stamp == 0

    async def a_read_that_expects_a_stamp_moves_nothing_unless_it_is_there(self) -> None:
        """Rule 6: short reads and long ones; nowhere are stamps taken for granted that cannot be read."""
        producer = await self._site.shared()
        async with self._reader(64 * limits.MIB) as reader:
            await reader.add(producer)
            right, readable = _stamp(producer, 4096), reader.of(PeerAdded)[0].stamps
            for count, (at, expected, proven) in itertools.product(
                (1, 256),
                (
                    (producer.stamps + 4096, right ^ 1, False),
                    (producer.stamps + 4096, right ^ 1 << 64, False),
                    (producer.stamps + 4097, right, False),
                    (NOWHERE, right, False),
                    (0, right, False),
                    (producer.stamps + 4096, right, readable),
                ),
            ):
                end = await reader.end(reader.read(producer, blocks(0, count, 256 * KIB), stamp=at, expected=expected))
                assert isinstance(end, Landed if proven else ReadFailed), end
                assert bool(reader.memory.any()) is proven
                assert isinstance(end, Landed) or end.unproven
                reader.memory[:] = 0
            await reader.still_well(producer)

    async def a_stamp_that_cannot_be_read_is_none(self) -> None:
        """At an address outside the peer's memory: the read fails, or lands without a stamp."""
        producer = await self._site.shared()
        async with self._reader(64 * KIB) as reader:
            await reader.add(producer)
            end = await reader.end(reader.read(producer, blocks(0, 1, KIB), stamp=NOWHERE))
            assert not isinstance(end, Landed) or end.stamp == 0
            await reader.still_well(producer)

    async def a_short_read_overtakes_a_long_one(self) -> None:
        """Rule 4: a block asked for in the middle of a long read lands well before it."""
        producer = await self._site.shared()
        async with self._reader() as reader:
            await reader.add(producer)
            for times in (8, 64, 512):  # a GPU copies 2 GiB while this process looks once
                reader.memory[:] = 0
                long = reader.read(producer, everything(times))
                await reader.first_byte(pattern(producer.seed, 64))
                short = reader.read(producer, table([(PRODUCED - 16 * KIB, PRODUCED - 16 * KIB, 16 * KIB)]))
                ends = [await reader.end(short), await reader.end(long)]
                assert [type(end) for end in ends] == [Landed, Landed]
                in_order = [event for event in reader.events if event in ends]
                if in_order == ends:
                    break
            assert in_order == ends, "the long read had landed before the short one"
            assert np.array_equal(reader.memory, pattern(producer.seed, PRODUCED))

    async def a_long_read_lands_under_a_stream_of_short_ones(self) -> None:
        """Rule 4: no read starves."""
        producer = await self._site.shared()
        async with self._reader() as reader:
            await reader.add(producer)
            long = reader.read(producer, blocks(0, 256, 256 * KIB))
            shorts: list[int] = []
            async with asyncio.timeout(MOMENT):
                while not reader.ends(long):
                    shorts += [reader.read(producer, blocks(0, 1, 16 * KIB)) for _ in range(4)]
                    await reader.end(shorts[-4])
                    await asyncio.sleep(0)  # short reads may end within the command; the loop must turn all the same
            for short in shorts:
                assert isinstance(await reader.end(short), Landed)

    async def a_peer_added_again_brings_its_new_memory(self) -> None:
        """Rule 3, while reads of the old memory are open."""
        producer = await self._site.producer(4 * limits.MIB, 21)
        async with self._reader(8 * limits.MIB) as reader:
            await reader.add(producer)
            first = reader.read(producer, blocks(0, 64, 64 * KIB))
            metadata, base = await producer.register_more(limits.MIB, 22)
            before = reader.read(producer, blocks(0, 1, 64 * KIB), base)
            assert isinstance(await reader.end(before), ReadFailed), "memory that was not announced was read"
            reader.transport.add_peer(producer.agent, metadata)
            assert (await reader.answer(PeerAdded, 2)).agent == producer.agent
            assert isinstance(await reader.end(first), Landed)
            end = await reader.end(reader.read(producer, table([(0, 4 * limits.MIB, limits.MIB)]), base))
            assert isinstance(end, Landed), end
            assert np.array_equal(reader.memory[4 * limits.MIB : 5 * limits.MIB], pattern(22, limits.MIB))
            await reader.still_well(producer)
        await producer.kill()

    async def a_removed_peer_is_forgotten_once_its_reads_have_ended(self) -> None:
        """Rule 3."""
        producer = await self._site.shared()
        async with self._reader() as reader:
            await reader.add(producer)
            read = reader.read(producer, blocks(0, 1024, 256 * KIB))
            reader.transport.remove_peer(producer.agent)
            reader.transport.remove_peer("stranger")
            late = reader.read(producer, blocks(0, 1, 4 * KIB))
            assert isinstance(await reader.end(late), ReadFailed)
            assert isinstance(await reader.end(read), Landed)
            await reader.add(producer)
            await reader.still_well(producer)

    async def a_peer_removed_and_added_before_its_reads_have_ended_is_kept(self) -> None:
        """Rule 3."""
        producer = await self._site.shared()
        async with self._reader() as reader:
            await reader.add(producer)
            read = reader.read(producer, blocks(0, 1024, 256 * KIB))
            reader.transport.remove_peer(producer.agent)
            await reader.add(producer)
            assert isinstance(await reader.end(read), Landed)
            await reader.still_well(producer)

    async def a_read_from_an_unknown_agent_fails_and_names_it(self) -> None:
        """Reads that fail at once also fail in the order they were asked for."""
        producer = await self._site.shared()
        async with self._reader(64 * KIB) as reader:
            reads = [reader.read(producer, blocks(0, 1, 4 * KIB)) for _ in range(50)]
            end = await reader.end(reads[-1])
            assert isinstance(end, ReadFailed)
            assert repr(producer.agent) in end.reason
            assert [event.read for event in reader.of(ReadFailed)] == reads

    async def metadata_of_no_use_fails_the_peer_and_nothing_else(self) -> None:
        """Garbage, metadata of another agent, and truncated metadata, whose sender may never be added again."""
        producer, cut_short = await self._site.shared(), await self._site.producer(64 * KIB, 41)
        cases = [
            ("x", b""),
            ("x", b"garbage"),
            ("x", producer.metadata),
            (cut_short.agent, cut_short.metadata[:-20]),
        ]
        async with self._reader(64 * KIB) as reader:
            for count, (agent, metadata) in enumerate(cases, 1):
                reader.transport.add_peer(agent, metadata)
                failed = await reader.answer(PeerFailed, count)
                assert failed.agent == agent
                assert failed.reason
            await reader.add(producer)
            await reader.still_well(producer)
        await cut_short.kill()

    async def a_read_of_or_into_memory_that_is_not_registered_fails(self) -> None:
        """The peer stays as it was."""
        producer = await self._site.shared()
        async with self._reader(64 * KIB) as reader:
            await reader.add(producer)
            outside = table([(PRODUCED + limits.GIB, 0, 4 * KIB)]), table([(0, limits.GIB, 4 * KIB)])
            for descriptors in outside:
                assert isinstance(await reader.end(reader.read(producer, descriptors)), ReadFailed)
            await reader.still_well(producer)

    async def a_killed_peer_ends_its_reads_and_its_next_incarnation_is_read_from(self) -> None:
        """Each read ends once, the peer fails, and other peers are unaffected."""
        producer, other = await self._site.producer(PRODUCED, 31), await self._site.shared()
        async with self._reader() as reader:
            await reader.add(producer)
            await reader.add(other)
            reads = [reader.read(producer, blocks(0, 1024, 256 * KIB)) for _ in range(8)]
            await reader.first_byte(pattern(31, 64))
            await producer.kill()
            for read in reads:
                await reader.end(read)
            lost = await reader.answer(PeerFailed)
            last = reader.ends(reads[-1])[0]
            if isinstance(last, ReadFailed):
                assert not last.aborted
            else:  # memory may outlive its process
                assert reader.events.index(last) < reader.events.index(lost)
            after = await reader.end(reader.read(producer, blocks(0, 1, 4 * KIB)))
            assert isinstance(after, ReadFailed)
            assert [event.agent for event in reader.of(PeerFailed)] == [producer.agent]
            await reader.still_well(other)
            successor = await self._site.producer(limits.MIB, 32)
            await reader.add(successor)
            await reader.still_well(successor)
            assert [len(reader.ends(read)) for read in reads] == [1] * len(reads)
        await successor.kill()

    async def memory_can_be_deregistered_and_registered_again(self) -> None:
        """Each time with new metadata; memory that is not registered cannot be read into."""
        producer = await self._site.shared()
        async with self._reader(64 * KIB) as reader:
            await reader.add(producer)
            before = reader.transport.metadata
            reader.transport.deregister(1)
            gone = await reader.answer(Deregistered)
            assert (gone.pool, gone.metadata) == (1, reader.transport.metadata)
            assert gone.metadata != before
            assert isinstance(await reader.end(reader.read(producer, blocks(0, 1, 4 * KIB))), ReadFailed)
            reader.transport.register(2, reader.region)
            assert (await reader.answer(Registered, 2)).pool == 2
            await reader.still_well(producer)

    async def after_stop_nothing_is_heard_and_nothing_lands(self) -> None:
        """While a long read is open."""
        producer = await self._site.shared()
        async with self._reader() as reader:
            await reader.add(producer)
            read = reader.read(producer, everything(64))
            await reader.first_byte(pattern(producer.seed, 64))
            reader.transport.stop()
            heard = len(reader.events)
            reader.memory[:] = 0
        async with self._reader(64 * KIB) as witness:
            await witness.add(producer)
            await witness.still_well(producer)
        assert len(reader.events) == heard
        assert not reader.ends(read)
        assert not reader.memory.any()


CHECKS: Final = tuple(name for name in vars(Contract) if not name.startswith("_") and name != "run")
"""The names of the checks."""
