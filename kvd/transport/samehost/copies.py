"""Threads that copy the slices of reads. All threads share one queue, so each copies the next slice when it is free."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import Struct

from kvd import limits
from kvd.errors import DeviceError, InternalError, KvdError
from kvd.transport.interface import Answered, Event, Landed, ReadFailed, TransportDied
from kvd.transport.samehost.process_memory import copy_few
from kvd.transport.slices import U64, Chunk, Slice, SliceBounds, SliceQueue

if TYPE_CHECKING:
    from kvd.transport.interface import ReadRequest
    from kvd.transport.samehost.gpu import SmallCopies


SMALL_BYTES: Final = limits.MIB
SMALL_DESCRIPTORS: Final = 64
"""Reads up to this do not wait for a thread: to wake one up, and then the loop again, took 130 to 190 us of a pull of
1 MiB between host pools, which the loop copies in 50 to 100 (`kvd bench`, two cores)."""


Copy = Callable[[U64, U64, U64], None]
"""Of target, source, length: copies `length[i]` bytes from address `source[i]` to `target[i]`, which then have landed.

It raises OSError if not all could be copied, KvdError of a GPU, and `InternalError` if nobody knows what lands.
"""


class Memory(Struct, frozen=True, gc=False):
    """`size` bytes at `address` of this process; `device` is the GPU that has them, empty for host memory.

    `file` is a descriptor of the file that is mapped there, if a peer lends it; else -1.
    """

    address: int
    size: int
    device: str = ""
    file: int = -1

    @property
    def is_whole(self) -> bool:
        """Whether its file has all its pages; if its peer took some away, nothing may be copied out of the mapping."""
        status = os.fstat(self.file)
        return status.st_blocks * 512 >= status.st_size

    def addresses(self, offset: U64, length: U64) -> U64:
        """Where `length[i]` bytes at `offset[i]` begin; no length is above a slice's.

        Raises:
            OSError: some lie outside.

        """
        end = np.minimum(offset, np.uint64(self.size)) + length
        if int(end.max()) > self.size:
            first = int(end.argmax())
            raise self._outside(offset[first], length[first])
        return offset + np.uint64(self.address)

    def at(self, offset: int, length: int) -> int:
        """Where `length` bytes at `offset` begin.

        Raises:
            OSError: some lie outside.

        """
        if offset + length > self.size:
            raise self._outside(offset, length)
        return self.address + offset

    def _outside(self, offset: int, length: int) -> OSError:
        return OSError(f"{length} bytes at {offset} are outside of {self.size} registered bytes")


class Read(Struct, eq=False):
    """A read, and how far it is. `stamp` reads the word at an address of the peer; 0 if it cannot."""

    request: ReadRequest
    source: Memory
    target: Memory
    stamp: Callable[[int], int]
    copy: Copy | None = None
    """What threads copy it by; None for a read that does without them."""
    bounds: SliceBounds | None = None
    """Of its slices, if they are not the usual ones."""
    running: int = 0
    """Slices that are being copied."""
    started: float = 0.0
    failure: str = ""
    aborted: bool = False
    device_lost: bool = False
    """Whether a GPU failed for good."""
    placed: tuple[Chunk, U64, U64] | None = None
    """The latest chunk, with the addresses that it is copied to and from."""

    @property
    def is_small(self) -> bool:
        """Whether it does not wait for a thread, if that can be avoided."""
        descriptors = self.request.descriptors
        return descriptors.bytes <= SMALL_BYTES and descriptors.count <= SMALL_DESCRIPTORS

    def run(self, piece: Slice) -> None:
        """Copies a slice; what goes wrong becomes the read's failure."""
        assert self.copy is not None  # noqa: S101 - threads get no other
        self.started = self.started or time.perf_counter()
        part = slice(piece.start, piece.stop)
        try:
            target, source = self._place(piece.chunk)
            self.copy(target[part], source[part], piece.chunk.length[part])
        except InternalError:
            raise  # some of it may land yet: the read does not end, but the thread does, and with it the daemon
        except (OSError, KvdError) as error:
            self.fail(error)

    def run_few(self) -> None:
        """Copies all of a small read between host memory, without arrays, which take longer than the copy."""
        self.started = time.perf_counter()
        try:
            copies = self.request.descriptors.copies
            copy_few([(self.target.at(dst, size), self.source.at(src, size), size) for src, dst, size in copies])
        except OSError as error:
            self.fail(error)

    def launch(self, gpu: SmallCopies) -> None:
        """Begins to copy all of a small read within GPUs."""
        self.started = time.perf_counter()
        wanted = self.request.descriptors
        try:
            target = self.target.addresses(wanted.dst, wanted.length)
            gpu.launch(target, self.source.addresses(wanted.src, wanted.length), wanted.length)
        except (OSError, KvdError) as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Takes note of what went wrong; the first counts."""
        self.failure = self.failure or f"copy from {self.request.agent!r}: {error}"
        self.device_lost |= isinstance(error, DeviceError) and error.lost

    def _place(self, chunk: Chunk) -> tuple[U64, U64]:
        """The addresses of a chunk, on both sides, worked out once for all its slices."""
        placed = self.placed
        if placed is None or placed[0] is not chunk:
            target = self.target.addresses(chunk.dst, chunk.length)
            self.placed = placed = chunk, target, self.source.addresses(chunk.src, chunk.length)
        return placed[1:]

    def end(self) -> Landed | ReadFailed:
        """How it ended, once nothing of it is being copied: the stamp is read after the last byte."""
        number = self.request.read
        if self.failure:
            return ReadFailed(number, self.failure, self.aborted)
        seconds = time.perf_counter() - self.started if self.started else 0.0
        return Landed(number, seconds, self.stamp(self.request.stamp) if self.request.stamp else 0)


class CopyThreads:
    """`count` threads. `emit` takes each event, on one of them."""

    def __init__(self, count: int, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._changed = threading.Condition()
        """Held by whoever touches the queue or the reads."""
        self._queue = SliceQueue()
        self._reads: dict[int, Read] = {}
        self._stopped = False
        self._pings: dict[int, set[int]] = {}
        """The threads that have not answered, by the ping's number."""
        self._threads = [
            threading.Thread(target=self._run, args=(index,), name="kvd-copy", daemon=True) for index in range(count)
        ]

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def add(self, read: Read) -> None:
        """Queues a read, which ends in `Landed` or `ReadFailed`."""
        with self._changed:
            if self._queue.add(read.request, read.bounds):
                self._reads[read.request.read] = read
                self._changed.notify_all()
                return
        self._emit(read.end())

    def give_up(self, number: int, reason: str, *, aborted: bool = False) -> None:
        """Ends a read early, if slices of it wait; it has ended once none is being copied."""
        with self._changed:
            read = self._reads.get(number)
            if read is None or not self._queue.waiting(number):
                return
            read.failure, read.aborted = read.failure or reason, aborted
            self._queue.drop(number)
            if read.running:
                return
            del self._reads[number]
        self._emit(read.end())

    def ping(self, number: int) -> None:
        """Asks every thread for a sign of life; the last one emits `Answered`."""
        with self._changed:
            self._pings[number] = set(range(len(self._threads)))
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends the threads and waits for the slices that are being copied."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _run(self, index: int) -> None:
        try:
            while (work := self._next(index)) is not None:
                read, piece = work
                read.run(piece)
                if self._is_last(read, piece):
                    self._emit(read.end())
                    if read.device_lost:
                        self._emit(TransportDied(read.failure))
        except BaseException as error:
            self._emit(TransportDied(f"a thread that copies raised {type(error).__name__}: {error}"))
            raise

    def _next(self, index: int) -> tuple[Read, Slice] | None:
        """Waits for a slice to copy; None once stopped."""
        with self._changed:
            while not self._stopped:
                self._answer(index)
                piece = self._queue.pick()
                if piece is not None:
                    read = self._reads[piece.request.read]
                    read.running += 1
                    return read, piece
                self._changed.wait()
        return None

    def _answer(self, index: int) -> None:
        for number, missing in list(self._pings.items()):
            missing.discard(index)
            if not missing:
                del self._pings[number]
                self._emit(Answered(number))

    def _is_last(self, read: Read, piece: Slice) -> bool:
        """Takes note of a copied slice; whether the read has ended."""
        number = read.request.read
        with self._changed:
            self._queue.ended(piece)
            read.running -= 1
            if read.failure:
                self._queue.drop(number)
            if read.running or self._queue.waiting(number):
                return False
            del self._reads[number]
            return True
