"""Cuts reads into slices and decides the order in which slices are posted.

- A slice holds at most what its read's `SliceBounds` say; a descriptor longer than a slice is split.
- The next slice comes from the read that has posted the fewest bytes so far, so a short read overtakes a long one.
- A read that is a part of what is still to come waits for all others: nobody can use it yet.
- Every `limits.OLDEST_TURN`-th slice comes from the oldest read, so a stream of short reads starves nothing.
  Where that has no room beside what is in flight, its peer's others wait for it.
- Bytes in flight are bounded by `limits.MAX_BYTES_IN_FLIGHT` per peer, not per agent: slices of a peer that hangs never
  end, and must not take up the room of all the others.

Pure: no clock and no I/O. A read is cut a chunk of descriptors at a time, as it is posted, so that a read of millions
of descriptors delays nobody.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvd import limits

if TYPE_CHECKING:
    from kvd.transport.interface import ReadRequest

U64 = npt.NDArray[np.uint64]

CHUNK_DESCRIPTORS = 8 * limits.SLICE_DESCRIPTORS
"""Descriptors that are cut (and prepared) at once: 4096 keep that below 0.3 ms."""


class SliceBounds(NamedTuple):
    """What a slice holds at most."""

    bytes: int
    descriptors: int

    @classmethod
    def usual(cls) -> Self:
        """For copies at memory's or a network's speed."""
        return cls(limits.SLICE_BYTES, limits.SLICE_DESCRIPTORS)


@dataclass(slots=True, eq=False)
class Chunk:
    """Some descriptors of a read, none longer than a slice."""

    src: U64
    dst: U64
    length: U64


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """What is posted at once: the descriptors `[start, stop)` of a chunk, `bytes` in all."""

    request: ReadRequest
    chunk: Chunk
    start: int
    stop: int
    bytes: int


def cut(request: ReadRequest, bounds: SliceBounds) -> Iterator[Slice]:
    """The slices of a read in order, chunk by chunk; descriptors of length 0 vanish."""
    descriptors = request.descriptors
    size, count = descriptors.bytes, descriptors.count
    if size <= bounds.bytes and count <= bounds.descriptors and descriptors.length.all():
        if count:  # the usual small read, at a fifth of the cost
            yield Slice(request, Chunk(descriptors.src, descriptors.dst, descriptors.length), 0, count, size)
        return
    step = max(CHUNK_DESCRIPTORS, bounds.descriptors)
    for first in range(0, count, step):
        part = slice(first, first + step)
        chunk = _split(descriptors.src[part], descriptors.dst[part], descriptors.length[part], bounds.bytes)
        for start, stop, size in _parts(chunk.length, bounds):
            yield Slice(request, chunk, start, stop, size)


def _split(src: U64, dst: U64, length: U64, longest: int) -> Chunk:
    """The same bytes in descriptors of 1 to `longest` bytes each."""
    if len(length) and int(length.min()) > 0 and int(length.max()) <= longest:
        return Chunk(src, dst, length)
    step = np.uint64(longest)
    pieces = ((length + (step - np.uint64(1))) // step).astype(np.int64)
    owner = np.repeat(np.arange(len(length)), pieces)
    rank = (np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)).astype(np.uint64)
    offset = rank * step
    return Chunk(src[owner] + offset, dst[owner] + offset, np.minimum(length[owner] - offset, step))


def _parts(length: U64, bounds: SliceBounds) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of each slice: as many descriptors as the bounds allow."""
    ends = np.cumsum(length)
    start, before = 0, 0
    while start < len(length):
        fitting = int(np.searchsorted(ends, np.uint64(before + bounds.bytes), side="right"))
        stop = min(fitting, start + bounds.descriptors)
        end = int(ends[stop - 1])
        yield start, stop, end - before
        start, before = stop, end


@dataclass(slots=True, eq=False)
class _Read:
    """A read with slices left to post. `age` numbers reads in order of arrival; `head` is its next slice."""

    age: int
    request: ReadRequest
    slices: Iterator[Slice]
    head: Slice
    posted: int = 0

    @property
    def rank(self) -> tuple[bool, int, int]:
        """The least is served next."""
        return self.request.part, self.posted, self.age


@dataclass(slots=True, eq=False)
class _PeerQueue:
    """The reads from one peer: by age, and as a heap of ranks.

    A heap entry is stale once its read has posted more or left. Stale entries are dropped when they reach the top, or
    all at once when they are many.
    """

    by_age: dict[int, _Read] = field(default_factory=dict)
    by_rank: list[tuple[bool, int, int]] = field(default_factory=list)
    in_flight: int = 0
    """Bytes picked that have not ended."""

    slices: int = 0
    """Slices picked that have not ended."""

    due: bool = False
    """Whether its oldest read had its turn and found no room: until it has, no other of this peer takes that."""

    def has_room(self, size: int, slices: int) -> bool:
        return self.in_flight == 0 or (self.in_flight + size <= limits.MAX_BYTES_IN_FLIGHT and self.slices < slices)

    def push(self, read: _Read) -> None:
        if len(self.by_rank) > 2 * len(self.by_age) + 64:
            self.by_rank = [entry for entry in self.by_rank if self._is_current(entry)]
            heapq.heapify(self.by_rank)
        heapq.heappush(self.by_rank, read.rank)

    def first(self) -> _Read | None:
        while self.by_rank and not self._is_current(self.by_rank[0]):
            heapq.heappop(self.by_rank)
        return self.by_age[self.by_rank[0][-1]] if self.by_rank else None

    def oldest(self) -> _Read | None:
        return next(iter(self.by_age.values()), None)

    def _is_current(self, entry: tuple[bool, int, int]) -> bool:
        read = self.by_age.get(entry[-1])
        return read is not None and read.rank == entry


class SliceQueue:
    """The reads of one agent that have slices to post, and what is in flight of each peer, at most so many `slices`."""

    def __init__(self, slices: int = sys.maxsize) -> None:
        self._most = slices
        self._reads: dict[int, _Read] = {}
        self._queues: dict[str, _PeerQueue] = {}
        self._ages = 0
        self._picks = 0

    def add(self, request: ReadRequest, bounds: SliceBounds | None = None) -> bool:
        """Queues a read, in slices within `bounds` or else the usual ones; False if it is empty."""
        slices = cut(request, bounds or SliceBounds.usual())
        head = next(slices, None)
        if head is None:
            return False
        self._ages += 1
        read = _Read(self._ages, request, slices, head)
        queue = self._queues.setdefault(request.agent, _PeerQueue())
        self._reads[request.read] = queue.by_age[read.age] = read
        queue.push(read)
        return True

    def pick(self) -> Slice | None:
        """The slice to post now, in flight until `ended`; None if nothing may be posted."""
        oldest_turn = (self._picks + 1) % limits.OLDEST_TURN == 0
        best: tuple[bool, int, int] | None = None
        for queue in self._queues.values():
            due = oldest_turn or queue.due
            read = queue.oldest() if due else queue.first()
            if read is None:
                continue
            if not queue.has_room(read.head.bytes, self._most):
                queue.due = due
                continue
            rank = (False, 0, read.age) if due else read.rank
            if best is None or rank < best:
                best, chosen, source = rank, read, queue
        if best is None:
            return None
        self._picks += 1
        source.due = False
        return self._take(chosen, source)

    def ended(self, piece: Slice) -> None:
        """A posted slice has ended: its bytes are no longer in flight."""
        queue = self._queues[piece.request.agent]
        queue.in_flight -= piece.bytes
        queue.slices -= 1
        self._sweep(piece.request.agent)

    def drop(self, read: int) -> None:
        """Forgets what `read` has not posted; a read that is unknown or posted entirely is ignored."""
        dropped = self._reads.pop(read, None)
        if dropped is not None:
            agent = dropped.request.agent
            del self._queues[agent].by_age[dropped.age]
            self._sweep(agent)

    def waiting(self, read: int) -> bool:
        """Whether `read` has slices that were not picked yet."""
        return read in self._reads

    def __bool__(self) -> bool:
        return bool(self._reads)

    def _take(self, read: _Read, queue: _PeerQueue) -> Slice:
        piece = read.head
        queue.in_flight += piece.bytes
        queue.slices += 1
        read.posted += piece.bytes
        following = next(read.slices, None)
        if following is None:
            del self._reads[piece.request.read], queue.by_age[read.age]
        else:
            read.head = following
            queue.push(read)
        return piece

    def _sweep(self, agent: str) -> None:
        queue = self._queues[agent]
        if not queue.in_flight and not queue.by_age:
            del self._queues[agent]
