from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd import limits
from kvd.transport.interface import ReadRequest
from kvd.transport.slices import CHUNK_DESCRIPTORS, Slice, SliceBounds, SliceQueue
from kvd.transport.slices import cut as cut_within
from tests.transport.descriptors import Descriptors, descriptors, request

LENGTHS = st.lists(
    st.one_of(st.integers(0, 70_000), st.integers(limits.SLICE_BYTES - 2, 3 * limits.SLICE_BYTES + 2)), max_size=40
)


BOUNDS = st.builds(SliceBounds, st.integers(1, 4 * limits.SLICE_BYTES), st.integers(1, 2 * CHUNK_DESCRIPTORS))


def cut(read: ReadRequest, bounds: SliceBounds | None = None) -> Iterator[Slice]:
    return cut_within(read, bounds or SliceBounds.usual())


def packed(lengths: list[int]) -> Descriptors:
    ends = np.cumsum([0, *lengths])
    return descriptors((int(e), int(e) + 7, n) for e, n in zip(ends, lengths, strict=False))


def blocks(count: int, size: int) -> Descriptors:
    start = np.arange(count, dtype=np.uint64) * np.uint64(size)
    return Descriptors(start, start, np.full(count, size, np.uint64))


def pieces(piece: Slice) -> list[tuple[int, int, int]]:
    part = slice(piece.start, piece.stop)
    chunk = piece.chunk
    return [
        (int(s), int(d), int(n)) for s, d, n in zip(chunk.src[part], chunk.dst[part], chunk.length[part], strict=True)
    ]


def in_flight(queue: SliceQueue, agent: str) -> int:
    return queue._queues[agent].in_flight if agent in queue._queues else 0


def take(queue: SliceQueue) -> Slice:
    piece = queue.pick()
    assert piece is not None
    return piece


@given(LENGTHS, BOUNDS)
def test_the_slices_of_a_read_cover_its_bytes_once_and_in_order(lengths: list[int], bounds: SliceBounds) -> None:
    bounds = bounds._replace(bytes=max(bounds.bytes, sum(lengths) // 1000))  # slices of a byte take long
    at = 0
    for piece in cut(request(1, packed(lengths)), bounds):
        assert piece.bytes == sum(n for _, _, n in pieces(piece))
        for src, dst, length in pieces(piece):
            assert (src, dst) == (at, at + 7)
            at += length
    assert at == sum(lengths)


@given(LENGTHS, BOUNDS)
def test_no_slice_exceeds_a_bound_and_none_is_empty(lengths: list[int], bounds: SliceBounds) -> None:
    bounds = bounds._replace(bytes=max(bounds.bytes, sum(lengths) // 1000))
    for piece in cut(request(1, packed(lengths)), bounds):
        assert 0 < piece.bytes <= bounds.bytes
        assert 0 < piece.stop - piece.start <= bounds.descriptors
        assert all(n > 0 for _, _, n in pieces(piece))


def test_a_read_of_many_descriptors_is_cut_a_chunk_at_a_time() -> None:
    found = list(cut(request(1, blocks(2 * CHUNK_DESCRIPTORS + 5, 16))))
    assert [len(chunk.length) for chunk in dict.fromkeys(piece.chunk for piece in found)] == [
        CHUNK_DESCRIPTORS,
        CHUNK_DESCRIPTORS,
        5,
    ]


def test_a_slice_is_as_large_as_the_limits_allow() -> None:
    quarter_mib = list(cut(request(1, blocks(64, 256 * limits.KIB))))
    assert [piece.bytes for piece in quarter_mib] == [limits.SLICE_BYTES] * 4
    small = list(cut(request(1, blocks(1024, 64))))
    assert [piece.stop - piece.start for piece in small] == [limits.SLICE_DESCRIPTORS] * 2


def test_a_read_without_bytes_has_no_slices() -> None:
    queue = SliceQueue()
    assert not queue.add(request(1, descriptors([])))
    assert not queue.add(request(2, descriptors([(0, 0, 0)])))
    assert not queue
    assert queue.pick() is None


def test_a_short_read_overtakes_a_long_one() -> None:
    queue = SliceQueue()
    queue.add(request(1, blocks(64, limits.MIB)))
    for _ in range(2):
        first = take(queue)
        assert first.request.read == 1
    queue.add(request(2, blocks(1, 16)))
    second = take(queue)
    assert second.request.read == 2


def test_what_somebody_waits_for_overtakes_parts_of_what_is_still_to_come() -> None:
    queue = SliceQueue()
    for read in range(3):
        queue.add(request(read, blocks(8, limits.SLICE_BYTES), "pq"[read % 2], part=True))
    picked = [take(queue)]
    queue.add(request(3, blocks(5, limits.SLICE_BYTES), "p"))
    while queue:
        queue.ended(picked[-1])
        picked.append(take(queue))
    order = [piece.request.read for piece in picked]
    waited = [place for place, read in enumerate(order) if read == 3]
    oldest_turns = [place for place in range(waited[0], waited[-1]) if order[place] != 3]
    assert waited[0] == 1
    assert len(oldest_turns) <= 1
    assert sorted(order) == sorted([0] * 8 + [1] * 8 + [2] * 8 + [3] * 5)


def test_parts_are_not_starved_by_what_somebody_waits_for() -> None:
    queue = SliceQueue()
    queue.add(request(0, blocks(40, limits.SLICE_BYTES), part=True))
    picked = []
    for number in range(1, 101):
        queue.add(request(number, blocks(1, limits.SLICE_BYTES)))
        piece = take(queue)
        queue.ended(piece)
        picked.append(piece.request.read)
    assert picked.count(0) >= len(picked) // limits.OLDEST_TURN


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("peers", ["ppq", "pq", "pqr"])
def test_short_reads_of_several_peers_do_not_starve_a_long_one_whose_slices_have_no_room_beside_others(
    threads: int, peers: str
) -> None:
    """All threads are busy with short reads, of its own peer, too, and each that ends is followed by another one."""
    queue, running, slices = SliceQueue(), list[Slice](), 20
    bounds = SliceBounds(limits.GPU_SLICE_BYTES, limits.GPU_SLICE_DESCRIPTORS)
    queue.add(request(0, blocks(slices * 1024, 256 * limits.KIB), "p"), bounds)
    for number in range(1, 10):
        queue.add(request(number, blocks(1, 16), peers[number % len(peers)]))
    for number in range(10, 10 + 10 * slices):
        while len(running) < threads and (piece := queue.pick()):
            running.append(piece)
        queue.add(request(number, blocks(1, 16), running[0].request.agent))
        queue.ended(running.pop(0))
    assert not queue.waiting(0)


def test_a_stream_of_short_reads_does_not_starve_a_long_one() -> None:
    queue = SliceQueue()
    queue.add(request(0, blocks(40, limits.SLICE_BYTES)))
    picked = []
    for short in range(1, 101):
        queue.add(request(short, blocks(1, 16)))
        piece = take(queue)
        queue.ended(piece)
        picked.append(piece.request.read)
    assert picked.count(0) >= len(picked) // limits.OLDEST_TURN


def test_the_oldest_turn_spans_the_peers() -> None:
    queue = SliceQueue()
    queue.add(request(0, blocks(400, limits.SLICE_BYTES)))
    queue.add(request(1, blocks(400, limits.SLICE_BYTES), "q"))
    picked = []
    for _ in range(40):
        piece = take(queue)
        queue.ended(piece)
        picked.append(piece.request.read)
    assert 16 <= picked.count(1) <= 24


def test_bytes_in_flight_are_bounded_for_each_peer_and_a_stuck_peer_takes_no_room_of_another() -> None:
    queue = SliceQueue()
    queue.add(request(1, blocks(1024, limits.MIB), "stuck"))
    posted = 0
    while (piece := queue.pick()) is not None:
        posted += piece.bytes
    assert posted == in_flight(queue, "stuck") == limits.MAX_BYTES_IN_FLIGHT
    queue.add(request(2, blocks(1, 16), "well"))
    piece = take(queue)
    assert piece.request.read == 2


def test_a_dropped_read_posts_no_more_and_its_posted_bytes_stay_in_flight() -> None:
    queue = SliceQueue()
    queue.add(request(1, blocks(64, limits.MIB)))
    piece = take(queue)
    queue.drop(1)
    assert not queue.waiting(1)
    assert queue.pick() is None
    assert in_flight(queue, "p") == piece.bytes
    queue.ended(piece)
    assert in_flight(queue, "p") == 0


def test_reads_added_and_dropped_behind_a_stuck_peer_leave_nothing_behind() -> None:
    queue = SliceQueue()
    queue.add(request(0, blocks(64, limits.MIB)))
    while (piece := queue.pick()) is not None:
        last = piece
    for read in range(1, 1000):
        queue.add(request(read, blocks(1, limits.MIB)))
        queue.drop(read)
    of_peer = queue._queues["p"]
    assert len(of_peer.by_rank) < 100
    assert last.request.read == 0


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("abc"), LENGTHS, st.booleans()),
        st.tuples(st.just("pick"), st.integers(1, 20)),
        st.tuples(st.just("end"), st.integers(0, 50)),
        st.tuples(st.just("drop"), st.integers(0, 10)),
    ),
    max_size=40,
)


class Model:
    """What a queue is asked to do, checked against the plainest account of it."""

    def __init__(self) -> None:
        self.queue = SliceQueue()
        self.agent: list[str] = []
        self.wanted: list[int] = []
        self.posted: list[int] = []
        self.dropped: set[int] = set()
        self.flying: list[Slice] = []

    def add(self, agent: str, lengths: list[int], part: bool) -> None:
        size = sum(lengths)
        assert self.queue.add(request(len(self.agent), packed(lengths), agent, part=part)) == (size > 0)
        self.agent.append(agent)
        self.wanted.append(size)
        self.posted.append(0)

    def pick(self, times: int) -> None:
        for _ in range(times):
            piece = self.queue.pick()
            if piece is None:
                return
            assert piece.request.read not in self.dropped
            self.posted[piece.request.read] += piece.bytes
            self.flying.append(piece)
            agent = self.agent[piece.request.read]
            flying = sum(other.bytes for other in self.flying if self.agent[other.request.read] == agent)
            assert flying == in_flight(self.queue, agent) <= limits.MAX_BYTES_IN_FLIGHT

    def end(self, which: int) -> None:
        if self.flying:
            piece = self.flying.pop(which % len(self.flying))
            self.queue.ended(piece)

    def drop(self, read: int) -> None:
        if self.queue.waiting(read):
            self.dropped.add(read)
        self.queue.drop(read)


@settings(max_examples=60, deadline=None)
@given(ACTIONS)
def test_whatever_happens_every_byte_is_posted_once_or_dropped_and_the_bounds_hold(actions: list[tuple]) -> None:
    model = Model()
    for kind, *arguments in actions:
        getattr(model, kind)(*arguments)
    while model.queue or model.flying:
        model.pick(1000)
        model.end(0)
    kept = [read for read in range(len(model.wanted)) if read not in model.dropped]
    assert [model.posted[read] for read in kept] == [model.wanted[read] for read in kept]
    assert not model.queue._queues
