"""Which bytes go next: reads cut into slices, and the order in which the slices are posted.

- A slice holds at most `limits.SLICE_BYTES` and `limits.SLICE_DESCRIPTORS`; a descriptor longer than a slice is split.
- The next slice is one of the read that has posted the fewest bytes so far, so a short read overtakes a long one.
- Every `limits.OLDEST_TURN`-th slice is one of the oldest read, so a stream of short reads starves nothing.
- Bytes posted and not yet ended are bounded by `limits.MAX_BYTES_IN_FLIGHT` for each peer. The bound is a peer's and
  not the agent's: slices of a peer that hangs never end, and must not take the room of all the others.

No clock, no memory but the arrays of the descriptors. Reads are cut as they are posted, a chunk of descriptors at a
time, so that a read of millions of descriptors delays nobody.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvd import limits

if TYPE_CHECKING:
    from kvd.plan import Descriptors

U64 = npt.NDArray[np.uint64]

CHUNK_DESCRIPTORS = 8 * limits.SLICE_DESCRIPTORS
"""Descriptors that are cut (and prepared) at once: 4096 keep that below 0.3 ms."""


@dataclass(slots=True, eq=False)
class Chunk:
    """Some descriptors of a read, none longer than a slice."""

    src: U64
    dst: U64
    length: U64


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """What is posted at once: the descriptors `[start, stop)` of a chunk, `bytes` in all."""

    read: int
    chunk: Chunk
    start: int
    stop: int
    bytes: int


def cut(read: int, descriptors: Descriptors) -> Iterator[Slice]:
    """The slices of a read in order, chunk by chunk; descriptors of length 0 vanish."""
    size, count = descriptors.bytes, descriptors.count
    if size <= limits.SLICE_BYTES and count <= limits.SLICE_DESCRIPTORS and descriptors.length.all():
        if count:  # the usual small read, at a fifth of the cost
            yield Slice(read, Chunk(descriptors.src, descriptors.dst, descriptors.length), 0, count, size)
        return
    for first in range(0, count, CHUNK_DESCRIPTORS):
        part = slice(first, first + CHUNK_DESCRIPTORS)
        chunk = _split(descriptors.src[part], descriptors.dst[part], descriptors.length[part])
        for start, stop, size in _bounds(chunk.length):
            yield Slice(read, chunk, start, stop, size)


class Slices:
    """The slices of one read in order. Each is taken once, by whichever of the threads that share them has room."""

    def __init__(self, read: int, descriptors: Descriptors) -> None:
        self.read = read
        self._descriptors = descriptors
        self._slices = cut(read, descriptors)
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """Of the whole read."""
        return self._descriptors.bytes

    def take(self) -> Slice | None:
        """The next slice, None where all are taken."""
        with self._lock:
            return next(self._slices, None)


def _split(src: U64, dst: U64, length: U64) -> Chunk:
    """The same bytes in descriptors of 1 to `limits.SLICE_BYTES` bytes each."""
    if len(length) and int(length.min()) > 0 and int(length.max()) <= limits.SLICE_BYTES:
        return Chunk(src, dst, length)
    step = np.uint64(limits.SLICE_BYTES)
    pieces = ((length + (step - np.uint64(1))) // step).astype(np.int64)
    owner = np.repeat(np.arange(len(length)), pieces)
    rank = (np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)).astype(np.uint64)
    offset = rank * step
    return Chunk(src[owner] + offset, dst[owner] + offset, np.minimum(length[owner] - offset, step))


def _bounds(length: U64) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of each slice: as many descriptors as the two limits allow."""
    ends = np.cumsum(length)
    start, before = 0, 0
    while start < len(length):
        fitting = int(np.searchsorted(ends, np.uint64(before + limits.SLICE_BYTES), side="right"))
        stop = min(fitting, start + limits.SLICE_DESCRIPTORS)
        end = int(ends[stop - 1])
        yield start, stop, end - before
        start, before = stop, end


@dataclass(slots=True, eq=False)
class _Read:
    """A read with something left to post. `age` numbers reads in the order they came."""

    key: int
    age: int
    agent: str
    slices: Slices
    head: Slice
    posted: int = 0


@dataclass(slots=True, eq=False)
class _PeerQueue:
    """The reads from one peer: by age, and as a heap of (bytes posted, age).

    A heap entry is stale once its read posted more or left; stale entries go when they come up, or when they are many.
    """

    by_age: dict[int, _Read] = field(default_factory=dict)
    by_posted: list[tuple[int, int]] = field(default_factory=list)
    in_flight: int = 0

    def has_room(self, size: int) -> bool:
        return self.in_flight == 0 or self.in_flight + size <= limits.MAX_BYTES_IN_FLIGHT

    def push(self, read: _Read) -> None:
        if len(self.by_posted) > 2 * len(self.by_age) + 64:
            self.by_posted = [entry for entry in self.by_posted if self._is_current(entry)]
            heapq.heapify(self.by_posted)
        heapq.heappush(self.by_posted, (read.posted, read.age))

    def fewest_posted(self) -> _Read | None:
        while self.by_posted and not self._is_current(self.by_posted[0]):
            heapq.heappop(self.by_posted)
        return self.by_age[self.by_posted[0][1]] if self.by_posted else None

    def oldest(self) -> _Read | None:
        return next(iter(self.by_age.values()), None)

    def _is_current(self, entry: tuple[int, int]) -> bool:
        posted, age = entry
        read = self.by_age.get(age)
        return read is not None and read.posted == posted


def _rank(read: _Read, oldest_turn: bool) -> tuple[int, int]:
    return (0 if oldest_turn else read.posted, read.age)


class SliceQueue:
    """The reads of one agent that have slices to post, and the bytes in flight of each peer."""

    def __init__(self) -> None:
        self._reads: dict[int, _Read] = {}
        self._queues: dict[str, _PeerQueue] = {}
        self._ages = 0
        self._picks = 0

    def add(self, agent: str, slices: Slices) -> bool:
        """Queues a read from `agent`; False where there is no slice to take."""
        head = slices.take()
        if head is None:
            return False
        self._ages += 1
        waiting = _Read(slices.read, self._ages, agent, slices, head)
        queue = self._queues.setdefault(agent, _PeerQueue())
        self._reads[slices.read] = queue.by_age[waiting.age] = waiting
        queue.push(waiting)
        return True

    def pick(self) -> Slice | None:
        """The slice to post now, counted as in flight until `ended`; None where nothing may be posted."""
        oldest_turn = (self._picks + 1) % limits.OLDEST_TURN == 0
        best: _Read | None = None
        for queue in self._queues.values():
            read = queue.oldest() if oldest_turn else queue.fewest_posted()
            if read is None or not queue.has_room(read.head.bytes):
                continue
            if best is None or _rank(read, oldest_turn) < _rank(best, oldest_turn):
                best = read
        if best is None:
            return None
        self._picks += 1
        return self._take(best)

    def ended(self, agent: str, piece: Slice) -> None:
        """A posted slice is terminal: its bytes are not in flight any more."""
        self._queues[agent].in_flight -= piece.bytes
        self._sweep(agent)

    def drop(self, read: int) -> None:
        """Forgets what `read` has not posted; a read that is unknown or posted entirely is ignored."""
        dropped = self._reads.pop(read, None)
        if dropped is not None:
            del self._queues[dropped.agent].by_age[dropped.age]
            self._sweep(dropped.agent)

    def waiting(self, read: int) -> bool:
        """Whether `read` has slices that were not picked yet."""
        return read in self._reads

    def bytes_in_flight(self, agent: str) -> int:
        """Bytes picked and not ended of one peer."""
        return self._queues[agent].in_flight if agent in self._queues else 0

    def __bool__(self) -> bool:
        return bool(self._reads)

    def _take(self, read: _Read) -> Slice:
        piece, queue = read.head, self._queues[read.agent]
        queue.in_flight += piece.bytes
        read.posted += piece.bytes
        following = read.slices.take()
        if following is None:
            del self._reads[read.key], queue.by_age[read.age]
        else:
            read.head = following
            queue.push(read)
        return piece

    def _sweep(self, agent: str) -> None:
        queue = self._queues[agent]
        if not queue.in_flight and not queue.by_age:
            del self._queues[agent]
