"""Who gets a window, and what a window holds that was taken back."""

import asyncio
import itertools

import numpy as np
import pytest

from kvd import limits
from kvd.transport.interface import (
    Deregistered,
    Landed,
    PeerFailed,
    ReadFailed,
    ReadRequest,
    Region,
    TransportDied,
)
from kvd.transport.staged import arena, host, messages, reads
from kvd.transport.staged.arena import Buffers
from kvd.transport.staged.messages import StagedPool, State, Wanted, heading, tag
from kvd.transport.staged.reads import StagedReads
from kvd.transport.staged.windows import Windows, pieces
from tests.conformance.site import Reader, blocks, pattern, table
from tests.simulator.virtual.loop import VirtualLoop
from tests.transport.staged_site import StagedSite

TABLE = np.array([0, 8], np.uint64).tobytes()
TOKEN = b"t" * 16
_numbers = itertools.count(1)


def wanted(reader="r", token=TOKEN):
    return Wanted(reader.encode().ljust(16), next(_numbers), token, TABLE)


def key_of(asked):
    return asked.secret, asked.number


def served(windows):
    """Whose requests get the windows that are free now, in order."""
    return [use.agent for use in iter(windows.next, None)]


def test_the_reader_with_the_fewest_windows_is_next():
    windows = Windows(4)
    for _ in range(4):
        windows.ask("greedy", wanted("greedy"))
    windows.ask("late", wanted("late"))
    windows.ask("later", wanted("later"))
    assert served(windows) == ["greedy", "late", "later", "greedy"]


def test_readers_with_as_many_windows_take_turns():
    windows = Windows(1)
    asked = [(agent, wanted(agent)) for agent in "aabb"]
    for agent, request in asked:
        windows.ask(agent, request)
    order = []
    for _ in asked:
        use = windows.next()
        windows.copied(use, 0.0)
        order.append(use.agent)
        windows.finish(key_of(use.asked))
    assert order == ["a", "b", "a", "b"]
    assert (windows.in_use, windows.waiting) == (0, 0)


def test_a_request_that_comes_twice_or_when_too_many_wait_is_not_queued(monkeypatch):
    monkeypatch.setattr(limits, "MAX_STAGED_REQUESTS", 2)
    windows = Windows(0)
    first = wanted()
    assert windows.ask("r", first)
    assert not windows.ask("r", first)
    assert windows.ask("other", wanted("other"))
    assert not windows.ask("third", wanted("third"))
    assert windows.waiting == 2


def test_a_reader_that_is_about_to_have_too_many_requests_loses_its_oldest():
    windows = Windows(2)
    for _ in range(limits.MAX_STAGED_SLICES):
        assert windows.end_oldest(wanted().secret) is None
        windows.ask("r", wanted())
    windows.ask("other", wanted("other"))
    shown, copied = windows.next(), windows.next()
    windows.copied(shown, 0.0)
    windows.finish(key_of(copied.asked))
    assert (shown.agent, copied.agent) == ("r", "other")
    assert windows.end_oldest(wanted().secret) == shown.window  # which is to be wiped
    assert windows.end_oldest(wanted().secret) is None  # there is room for one
    windows.ask("r", wanted())
    assert windows.end_oldest(wanted().secret) is None  # the oldest one waited
    assert windows.waiting == limits.MAX_STAGED_SLICES - 1


def test_once_no_reader_is_there_every_window_is_free_or_will_be_when_it_is_copied():
    windows = Windows(2)
    for agent in ("a", "b", "c"):
        windows.ask(agent, wanted(agent))
    shown, copied = windows.next(), windows.next()
    windows.copied(shown, 0.0)
    assert windows.end_all() == [shown.window]
    assert (windows.in_use, windows.waiting) == (1, 0)
    assert not windows.copied(copied, 0.0)
    assert windows.in_use == 0


def test_a_window_that_nobody_gives_back_is_taken_back_after_its_time():
    windows = Windows(1)
    windows.ask("killed", wanted("killed"))
    windows.copied(windows.next(), 10.0)
    windows.ask("other", wanted("other"))
    assert windows.take_back(10.0 + limits.WINDOW_SECONDS - 1) == []
    assert served(windows) == []
    assert windows.take_back(10.0 + limits.WINDOW_SECONDS) == [0]
    assert served(windows) == ["other"]


def test_a_request_that_ends_while_it_is_copied_frees_its_window_only_afterwards():
    windows = Windows(1)
    windows.ask("r", wanted())
    use = windows.next()
    assert windows.finish(key_of(use.asked)) is None
    windows.ask("other", wanted("other"))
    assert windows.next() is None
    assert not windows.copied(use, 0.0)
    assert served(windows) == ["other"]


def test_a_request_is_ended_by_nobody_but_who_knows_its_secret():
    windows = Windows(1)
    request = wanted()
    windows.ask("r", request)
    use = windows.next()
    windows.copied(use, 0.0)
    assert windows.finish((b"guessed-" * 2, request.number)) is None
    assert windows.in_use == 1


@pytest.mark.parametrize(
    ("offsets", "lengths", "good"),
    [
        ([0, 100], [100, 28], True),
        ([0, 101], [100, 28], False),
        ([2**64 - 4], [8], False),
        ([0], [0], False),
        ([0], [2**64 - 1], False),
        ([0, 0], [limits.SLICE_BYTES, 1], False),
        ([], [], False),
    ],
)
def test_pieces_lie_in_the_pool_and_fit_a_window(offsets, lengths, good):
    asked = Wanted(b"s" * 16, 1, b"t" * 16, np.array([offsets, lengths], np.uint64).tobytes())
    size = 128 if max(lengths, default=0) < limits.SLICE_BYTES else 2 * limits.SLICE_BYTES
    assert (pieces(asked, size) is not None) is good


def test_a_table_of_an_odd_length_is_none():
    assert pieces(Wanted(b"s" * 16, 1, b"t" * 16, b"x" * 24), 1 << 20) is None


NO_MESSAGES = {
    "nothing": b"",
    "noise": b"garbage",
    "short": messages.encode(["Wanted", b"short", 1, b"t" * 16, b""]),
    "no text": b"\x91\xa6\xff\xfe\xfd\xfc\xfb\xfa",
    "nested": b"\x91" * 100_000,
}


@pytest.mark.parametrize("content", NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_what_is_no_message_is_none(content):
    assert messages.message(content) is None
    assert messages.metadata(content) is None


def test_no_two_requests_nor_states_have_one_tag():
    found = {tag(bytes([secret]) * 16, number, state) for secret in (1, 2) for number in (1, 2) for state in State}
    assert len(found) == 2 * 2 * len(State)


# --- over a network that the test plays -----------------------------------------------------------------------------


class Played:
    """Reads from a peer's pool on a GPU into host memory.

    `network` has what the network was asked to read, `asked` what the peer was asked for, and `finished` what it was
    told to be done with: both as the lines that say it is there.
    """

    def __init__(self):
        self.loop, self.network, self.events = VirtualLoop(), [], []
        self.asked, self.finished = [], []
        self.content = np.zeros(Buffers.size(0), np.uint8)
        self.region = Region(1 << 20, len(self.content), length=len(self.content))
        self.buffers = Buffers(self, 0)
        self.reads = StagedReads(self, self.buffers, None, self.loop, emit=self.events.append, idle=lambda _agent: None)
        self.peer = self.reads.peer("p")
        self.peer.learn({1 << 40: StagedPool(TOKEN, limits.MIB, 1 << 30, 3)})

    def read(self, asked):
        self.network.append(asked)

    def notify(self, _agent, content):
        said = messages.message(content)
        kept = self.asked if isinstance(said, Wanted) else self.finished
        kept.append(tag(said.secret, said.number, State.READY))

    def begin(self, number):
        self.reads.begin(ReadRequest(number, "p", 0, 1 << 40, table([(0, 0, 8)])), self.peer, into_gpu=False)

    def end(self, asked, *lines, head=None):
        """A read has landed; if it was of the board, these lines were there behind its heading."""
        self.network.remove(asked)
        if asked.local_base == self.buffers.base:
            row = int(asked.descriptors.dst[0])
            board = b"".join((heading(TOKEN) if head is None else head, *lines)).ljust(messages.BOARD_BYTES, b"\0")
            self.content[row : row + len(board)] = np.frombuffer(board, np.uint8)
        assert self.reads.ended(Landed(asked.read, 0.0))


def test_reads_that_fail_at_once_end_however_many_wait():
    played = Played()
    count = 2000
    for number in range(count):
        host_memory = ReadRequest(number, "p", 0, 2 << 40, table([(0, 0, 8)]))
        played.reads.begin(host_memory, played.peer, into_gpu=False)
    posted = list(played.network)
    assert len(posted) == limits.MAX_STAGED_SLICES
    played.read = lambda asked: played.reads.ended(ReadFailed(asked.read, "no descriptor is left"))
    assert played.reads.ended(Landed(posted[0].read, 0.0))
    assert len(played.events) == count - len(posted) + 1


def test_the_boards_of_a_peer_that_hangs_take_few_rows_from_others():
    played = Played()
    played.peer.learn(
        {(1 << 40) + base: StagedPool(TOKEN, limits.MIB, (1 << 30) + base, 3) for base in range(arena.ROWS)}
    )
    for number in range(arena.ROWS):
        played.reads.begin(
            ReadRequest(number, "p", 0, (1 << 40) + number, table([(0, 0, 8)])), played.peer, into_gpu=False
        )
        played.reads.abort(number)
    played.loop.run_until(1.0)
    assert len(played.network) < arena.ROWS / 8
    other = played.reads.peer("q")
    other.learn({1 << 40: StagedPool(b"q" * 16, limits.MIB, 1 << 30, 3)})
    played.reads.begin(ReadRequest(arena.ROWS, "q", 0, 1 << 40, table([(0, 0, 8)])), other, into_gpu=False)
    assert [asked.agent for asked in played.network][-1] == "q"


def test_a_look_at_the_board_that_began_before_the_last_byte_proves_nothing():
    played = Played()
    played.begin(1)
    [look] = played.network
    played.begin(2)  # which waits for its tag, so that the board is looked at all the time
    played.end(look, played.asked[0])
    [window] = played.network
    played.loop.run_until(1.0)
    [early] = [asked for asked in played.network if asked is not window]
    played.end(window)  # its last bytes came when the owner had let somebody else have the window, after that look
    played.end(early, played.asked[0])
    assert played.events == []
    played.loop.run_until(1.5)
    [late] = played.network
    played.end(late)
    assert played.events == []
    played.loop.run_until(1.8)
    [again] = played.network
    played.end(again, played.asked[2])
    assert [asked.remote_base for asked in played.network] == [1 << 30]  # it reads the window once more


@pytest.mark.parametrize("step", ["asked", "read", "checked"])
@pytest.mark.parametrize("end", ["aborted", "failed"])
def test_the_window_of_a_slice_that_comes_to_nothing_is_given_back_once_nothing_is_read_from_it(step, end):
    played = Played()
    played.begin(1)
    [asked] = played.network
    if step != "asked":
        played.end(asked, played.asked[0])
        [asked] = played.network
    if step == "checked":
        played.end(asked)
        [asked] = played.network
    if end == "aborted":
        played.reads.abort(1)
        assert played.finished == ([] if step == "read" else played.asked)
        played.end(asked)
        played.loop.run_until(1.0)
    else:
        played.network.remove(asked)
        assert played.reads.ended(ReadFailed(asked.read, "broken"))
    if (step, end) == ("read", "aborted"):  # it was on its way, and goes on
        assert played.events == []
        played.end(*played.network, played.asked[0])
        assert isinstance(played.events[0], Landed)
    else:
        assert isinstance(played.events[0], ReadFailed)
    assert played.finished == played.asked


def test_a_read_that_is_aborted_while_its_window_is_read_is_not_asked_for_again():
    played = Played()
    played.begin(1)
    played.end(*played.network, played.asked[0])
    [window] = played.network
    played.reads.abort(1)
    assert played.events == []  # the network writes for it
    played.end(window)
    played.end(*played.network)  # the owner has taken the window back
    [event] = played.events
    assert isinstance(event, ReadFailed)
    assert event.aborted
    assert len(played.asked) == 1
    assert played.finished == played.asked
    assert 1 not in played.reads._reads


# --- over the fake fabric -------------------------------------------------------------------------------------------


async def opened(site, size=limits.MIB):
    """A producer with a pool on a GPU, and a reader that knows it."""
    producer = await site.producer(size, 7)
    base, memory, _ = site.memory(size)
    reader = Reader(site.transport(), Region(base, size), memory)
    reader.transport.start(reader.on_event)
    reader.transport.register(1, reader.region)
    await reader.add(producer)
    return producer, reader


def windows_of(producer):
    return producer.end.windows_of(1)


@pytest.mark.parametrize("target", [True, False])
async def test_a_window_that_is_taken_back_in_mid_read_gives_nobody_other_bytes(target):
    """The reader finds no tag of its own after the last byte, and asks again."""
    producer, reader = await opened(StagedSite(source=True, target=target))
    arena, network = producer.end.arena_of(1), reader.transport._network
    plain, stolen = network.read, []

    def steal(request):
        plain(request)
        if request.descriptors.bytes > messages.BOARD_BYTES and not stolen:
            stolen.extend(windows_of(producer).take_back(float("inf")))
            for window in stolen:
                arena.write_line(1 + window, b"")
                start = messages.BOARD_BYTES + window * limits.SLICE_BYTES
                arena.memory.content[start : start + limits.MIB] = 0xEE

    network.read = steal
    end = await reader.end(reader.read(producer, blocks(0, 16, 64 * limits.KIB)))
    assert stolen
    assert isinstance(end, Landed), end
    assert np.array_equal(reader.memory, pattern(producer.seed, limits.MIB))


async def test_windows_of_a_killed_reader_are_given_to_others(monkeypatch):
    monkeypatch.setattr(limits, "WINDOW_SECONDS", 0.02)
    monkeypatch.setattr(limits, "STAGING_WINDOWS", 1)
    site = StagedSite(source=True, target=False)
    producer, killed = await opened(site)
    _, other = await opened(site)
    await other.add(producer)
    killed.read(producer, blocks(0, 16, 64 * limits.KIB))
    while not windows_of(producer).in_use:  # noqa: ASYNC110
        await asyncio.sleep(0)
    site.fabric.kill(killed.transport.agent)
    end = await other.end(other.read(producer, blocks(0, 16, 64 * limits.KIB)))
    assert isinstance(end, Landed), end
    assert np.array_equal(other.memory, pattern(producer.seed, limits.MIB))


async def test_an_owner_that_is_asked_for_a_slice_cannot_ask_another_one_for_it_with_other_bytes():
    site = StagedSite(source=True, target=False)
    producer, reader = await opened(site)
    size = 64 * limits.KIB
    bad = await site.producer(limits.MIB, 9)
    await reader.add(bad)
    served, heard = bad.end.transport._served, []
    hear = served.hear
    served.hear = lambda agent, message: (heard.append(message), hear(agent, message))
    assert isinstance(await reader.end(reader.read(bad, blocks(0, 1, size))), Landed)
    [pool] = producer.end.transport._served.staged().values()
    other = np.array([limits.MIB // 2, size], np.uint64).tobytes()
    secret, number = key_of(heard[0])
    for ahead in range(3, 3 + limits.MAX_STAGED_SLICES):
        producer.end.transport._served.hear("bad", Wanted(secret, number + ahead, pool.token, other))
    reader.memory[:] = 0
    assert isinstance(await reader.end(reader.read(producer, blocks(0, 1, size))), Landed)
    assert np.array_equal(reader.memory[:size], pattern(producer.seed, limits.MIB)[:size])


async def test_requests_in_a_reader_s_name_without_its_secret_end_none_of_that_reader():
    producer, _ = await opened(StagedSite(source=True, target=False))
    served = producer.end.transport._served
    [pool] = served.staged().values()
    asked = wanted("r", pool.token)
    served.hear("r", asked)
    await asyncio.sleep(0.001)
    for _ in range(2 * limits.MAX_STAGED_SLICES):
        served.hear("r", wanted("other", pool.token))
    assert windows_of(producer).finish(key_of(asked)) is not None


def for_good(monkeypatch):
    """There is one window, which is not taken back from who does not give it back; a megabyte takes several."""
    monkeypatch.setattr(limits, "WINDOW_SECONDS", 3600.0)
    monkeypatch.setattr(limits, "STAGING_WINDOWS", 1)
    monkeypatch.setattr(limits, "SLICE_BYTES", 64 * limits.KIB)


async def again(network, *readers, producer):
    """The process ends that reads and serves over the network, and the next one is there."""
    network.lose_process()
    network.gain_process()
    for reader in readers:
        await reader.until(lambda reader=reader: bool(reader.of(PeerFailed)))
        producer.metadata = producer.end.transport.metadata
        await reader.add(producer)


async def test_what_a_reader_asked_for_in_a_process_that_has_ended_does_not_keep_it_from_windows(monkeypatch):
    for_good(monkeypatch)
    site = StagedSite(source=True, target=False)
    producer, first = await opened(site)
    _, other = await opened(site)
    await other.add(producer)
    producer.end.gpu.held = True
    first.read(producer, blocks(0, 1, 64 * limits.KIB))
    while not windows_of(producer).in_use:  # noqa: ASYNC110
        await asyncio.sleep(0)
    other.read(producer, blocks(0, 16, 64 * limits.KIB))
    while windows_of(producer).waiting < limits.MAX_STAGED_SLICES:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await again(other.transport._network, other, producer=producer)
    read = other.read(producer, blocks(0, 16, 64 * limits.KIB))
    for _ in range(50):
        await asyncio.sleep(0)
    producer.end.gpu.held = False
    producer.end.gpu.work()
    end = await other.end(read)
    assert isinstance(end, Landed), end
    assert np.array_equal(other.memory, pattern(producer.seed, limits.MIB))


async def test_windows_are_free_once_the_process_has_ended_that_served_them(monkeypatch):
    for_good(monkeypatch)
    site = StagedSite(source=True, target=False)
    producer, first = await opened(site)
    _, other = await opened(site)
    await other.add(producer)
    read = first.read(producer, blocks(0, 16, 64 * limits.KIB))
    while not windows_of(producer).in_use:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await again(producer.end.network, first, producer=producer)
    assert isinstance(await first.end(read), ReadFailed)
    producer.metadata = producer.end.transport.metadata
    await other.add(producer)
    end = await other.end(other.read(producer, blocks(0, 16, 64 * limits.KIB)))
    assert isinstance(end, Landed), end
    assert np.array_equal(other.memory, pattern(producer.seed, limits.MIB))


async def test_a_slice_whose_request_was_lost_is_asked_for_again(monkeypatch):
    monkeypatch.setattr(reads, "AGAIN_SECONDS", 0.01)
    producer, reader = await opened(StagedSite(source=True, target=True))
    server = producer.end.transport._served
    hear, lost = server.hear, []

    def lose(agent, message):
        if isinstance(message, Wanted) and len(lost) < 3:
            lost.append(message)
        else:
            hear(agent, message)

    server.hear = lose
    end = await reader.end(reader.read(producer, blocks(0, 16, 64 * limits.KIB)))
    assert isinstance(end, Landed), end
    assert len(lost) == 3
    assert np.array_equal(reader.memory, pattern(producer.seed, limits.MIB))
    while windows_of(producer).in_use:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_peers_that_stage_nothing_take_none_of_the_slots_that_reads_from_others_need():
    site, size = StagedSite(source=True, target=True), 4 * limits.SLICE_BYTES
    honest, reader = await opened(site, size)
    slots = reader.transport._buffers.slots
    hung = [await site.producer(size, number) for number in range(5)]
    stuck = []
    for producer in hung:
        producer.end.gpu.held = True
        await reader.add(producer)
        stuck.append(reader.read(producer, blocks(0, 4, limits.SLICE_BYTES)))
    await asyncio.sleep(0.01)
    assert len(slots) == limits.STAGING_SLOTS
    held, slots[:] = slots[1:], slots[:1]  # reads then wait for the one that is left
    end = await reader.end(reader.read(honest, blocks(0, 4, limits.SLICE_BYTES)))
    assert isinstance(end, Landed), end
    assert np.array_equal(reader.memory, pattern(honest.seed, size))
    slots += held
    for read in stuck:
        reader.transport.abort(read)
        assert isinstance(await reader.end(read), ReadFailed)
    assert len(slots) == limits.STAGING_SLOTS
    assert not reader.transport._end.transport._reads._slotless


async def test_after_all_reads_no_window_slot_nor_row_is_taken():
    site = StagedSite(source=True, target=True)
    producer, reader = await opened(site, 8 * limits.MIB)
    reads = [reader.read(producer, blocks(i, 100, 64 * limits.KIB)) for i in range(8)]
    reader.transport.abort(reads[3])
    for read in reads:
        await reader.end(read)
    while windows_of(producer).in_use:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert len(reader.transport._buffers.slots) == limits.STAGING_SLOTS
    board = producer.end.arena_of(1).memory.content[: messages.BOARD_BYTES]
    assert not any(board[messages.LINE_BYTES :])


async def test_requests_for_what_nobody_may_read_take_no_window_and_are_refused():
    producer, reader = await opened(StagedSite(source=True, target=False))
    served = producer.end.transport._served
    for number in range(1000):
        served.hear(f"made-up-{number}", wanted(token=b"?" * 16))
    [pool] = served.staged().values()
    beyond = np.array([limits.MIB, 1], np.uint64).tobytes()
    for number in range(1000):
        served.hear(f"beyond-its-end-{number}", Wanted(b"s" * 16, next(_numbers), pool.token, beyond))
    assert (windows_of(producer).in_use, windows_of(producer).waiting) == (0, 0)
    read = reader.read(producer, blocks(0, 16, 64 * limits.KIB))
    served.hear("made-up", wanted(token=b"?" * 16))
    assert isinstance(await reader.end(read), Landed)


async def test_a_pool_is_deregistered_once_the_gpu_copies_nothing_from_it():
    producer, reader = await opened(StagedSite(source=True, target=False))
    gpu = producer.end.gpu
    gpu.held = True
    read = reader.read(producer, blocks(0, 1, 64 * limits.KIB))
    while not windows_of(producer).in_use:  # noqa: ASYNC110
        await asyncio.sleep(0)
    producer.end.transport.deregister(1)
    for _ in range(50):
        await asyncio.sleep(0)
    assert producer.events.empty()
    gpu.held = False
    gpu.work()
    assert isinstance(await producer.events.get(), Deregistered)
    await reader.end(read)
    late = await reader.end(reader.read(producer, blocks(0, 1, 64 * limits.KIB)))
    assert isinstance(late, ReadFailed)
    assert "has not registered the memory read" in late.reason


@pytest.mark.parametrize("lost", [False, True])
async def test_a_gpu_that_cannot_copy_fails_reads_at_both_ends_and_one_that_is_lost_ends_its_daemon(lost):
    producer, reader = await opened(StagedSite(source=True, target=True))
    reader.transport._end.gpu.break_down(lost=lost)
    end = await reader.end(reader.read(producer, blocks(0, 1, 64 * limits.KIB)))
    assert isinstance(end, ReadFailed)
    assert "the copy failed" in end.reason
    assert bool(reader.of(TransportDied)) is lost
    producer.end.gpu.break_down(lost=lost)
    end = await reader.end(reader.read(producer, blocks(0, 1, 64 * limits.KIB)))
    assert isinstance(end, ReadFailed)
    assert "its GPU could not copy them" in end.reason
    assert isinstance(producer.events.get_nowait(), TransportDied) if lost else producer.events.empty()


class Raising:
    """Copies whose thread has no memory for its arrays."""

    def __init__(self, uuid):
        pass

    def copy(self, targets, sources, lengths):
        raise MemoryError

    def close(self):
        pass


async def test_a_thread_that_raises_ends_its_daemon(monkeypatch):
    monkeypatch.setattr("kvd.transport.samehost.gpu.Gpu", Raising)
    producer, reader = await opened(StagedSite(source=True, target=False))
    gpu = host.Gpu("GPU-fake", 1, asyncio.get_running_loop())
    producer.end.gpu.copy = gpu.copy
    read = reader.read(producer, blocks(0, 1, 64 * limits.KIB))
    died = await producer.events.get()
    gpu.close()
    assert isinstance(died, TransportDied)
    assert "MemoryError" in died.reason
    assert reader.ends(read) == []
