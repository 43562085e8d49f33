"""The reader's side of staged reads: which slices are on their way, and how far each is.

A slice of a peer's GPU is *asked* for, its window is *read* once the pool's board says that the bytes are there, and
the board is looked at again afterwards (*checked*): what the window had all the time is what was asked for. If our
pools are on a GPU, slices are read into a slot of ours, and *copied* from there. A slice of a peer's host memory is
read there without being asked for.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np

from kvd import limits
from kvd.plan import Descriptors
from kvd.transport.interface import Event, Landed, Network, ReadFailed, ReadRequest
from kvd.transport.slices import SliceQueue
from kvd.transport.staged.arena import Buffers, Copy, packed, window_offset
from kvd.transport.staged.messages import (
    LINE_BYTES,
    Finished,
    State,
    Wanted,
    encode,
    heading,
    owner_secret,
    tag,
)
from kvd.transport.staged.parts import AT_REST, Board, Part, Read, StagedPeer, Step

_Ended = Callable[[Landed | ReadFailed], None]

_LOOK_SECONDS: Final = 0.001
"""Between two looks at a board: a copy of a GPU takes 0.1 ms and more, the look itself a round trip."""

_ROWS_PER_PEER: Final = 4
"""Boards of one peer that are read at a time: if it hangs, these rows are taken until the network gives it up."""

AGAIN_SECONDS: Final = 2.0
"""After which a slice is asked for again, each time after twice as long: owners drop what is above their bounds."""

_REASONS: Final = {
    State.REFUSED: "it has no such bytes in a pool that we may read",
    State.FAILED: "its GPU could not copy them",
}

_ABORTED: Final = "aborted"


class StagedReads:
    """The open reads of `network` that go by way of `buffers`; `copy` copies from their slots to our pools.

    `emit` takes their ends, `idle` each peer whose last read has ended.
    """

    def __init__(
        self,
        network: Network,
        buffers: Buffers,
        copy: Copy,
        loop: Any,
        *,
        emit: Callable[[Event], None],
        idle: Callable[[str], None],
    ) -> None:
        self._network = network
        self._buffers = buffers
        self._copy = copy
        self._loop = loop
        self._emit, self._idle = emit, idle
        self._key, self._numbers = os.urandom(16), itertools.count(1)
        self._queue = SliceQueue(limits.MAX_STAGED_SLICES)
        self._reads: dict[int, Read] = {}
        self._pumping = False
        self._slotless: dict[Part, None] = {}
        """Slices that could be read, if a slot were free; the first waits longest."""
        self._rows_of: Counter[str] = Counter()
        """How many rows have boards of a peer, by its agent."""
        self._handlers: dict[int, _Ended] = {}
        """Of reads of the network, whose numbers are negative."""

    def peer(self, agent: str) -> StagedPeer:
        """One to read from."""
        return StagedPeer(agent, owner_secret(self._key, agent))

    def begin(self, request: ReadRequest, peer: StagedPeer, *, into_gpu: bool) -> None:
        """Starts a read; its destination is registered and large enough."""
        read = Read(request, peer, peer.boards.get(request.remote_base), into_gpu)
        if not self._queue.add(request):
            self._emit(Landed(request.read, 0.0))
            return
        self._reads[request.read] = read
        peer.reads.add(request.read)
        self._pump()

    def abort(self, number: int) -> None:
        """Drops what is not on its way; a slice that is not read yet is not, nor one that is to be read again."""
        read = self._reads.get(number)
        if read is None:
            return
        read.aborted = True
        if self._queue.waiting(number) or any(part.step in AT_REST for part in read.parts):
            self._fail(read, _ABORTED)

    def lost(self, peer: StagedPeer, reason: str) -> None:
        """The peer is of no use any more: its reads fail."""
        for number in sorted(peer.reads):
            read = self._reads.get(number)
            if read is not None:
                self._fail(read, f"lost agent {peer.agent!r}: {reason}")

    def ended(self, event: Landed | ReadFailed) -> bool:
        """A read of the network has ended; False if it was not for a slice."""
        handler = self._handlers.pop(event.read, None)
        if handler is not None:
            handler(event)
        return handler is not None

    # --- slices -----------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        if self._pumping:  # a read that fails at once ends within this loop, and the loop goes on with the next
            return
        self._pumping = True
        while (piece := self._queue.pick()) is not None:
            read = self._reads[piece.request.read]
            read.started = read.started or time.perf_counter()
            part = Part(read, piece)
            read.parts.add(part)
            if read.board is None:
                self._read_into_slot(part)
            else:
                self._ask(part, read.board)
        self._pumping = False

    def _read_into_slot(self, part: Part) -> None:
        """Reads once a slot is free, if it needs one: peers that stage nothing take none of them."""
        if part.read.into_gpu and part.slot is None:
            if not self._buffers.slots:
                self._slotless[part] = None
                return
            part.slot = self._buffers.slots.pop()
        self._read(part)

    def _give_slot_back(self, part: Part) -> None:
        if part.slot is not None:
            self._buffers.slots.append(part.slot)
            part.slot = None
            if self._slotless:
                self._loop.call_soon(self._use_slots)

    def _use_slots(self) -> None:
        while self._slotless and self._buffers.slots:
            del self._slotless[part := next(iter(self._slotless))]
            self._read_into_slot(part)

    def _ask(self, part: Part, board: Board) -> None:
        self._give_slot_back(part)
        part.number, part.step = next(self._numbers), Step.ASKED
        part.patience = 2 * part.patience or AGAIN_SECONDS
        part.again = self._loop.time() + part.patience
        source, _, length = part.rows
        table = np.concatenate((source, length)).tobytes()
        self._network.notify(board.agent, encode(Wanted(board.secret, part.number, board.pool.token, table)))
        self._await(board, part)

    def _finish(self, board: Board, part: Part) -> None:
        """The peer may use the window again."""
        self._network.notify(board.agent, encode(Finished(board.secret, part.number, board.pool.token)))

    def _read(self, part: Part) -> None:
        part.step = Step.READ
        read, (source, target, length) = part.read, part.rows
        remote, local = read.request.remote_base, read.request.local_base
        if read.board is not None:
            remote, source = read.board.pool.arena, packed(window_offset(part.window), length)
        if part.slot is not None:
            local, target = self._buffers.base, packed(self._buffers.slot_offset(part.slot), length)
        if read.board is not None and part.slot is not None:  # both are contiguous
            source, target, length = source[:1], target[:1], length.sum(keepdims=True)
        wanted, goes_on = Descriptors(source, target, length), read.request.part
        asked = ReadRequest(-next(self._numbers), read.peer.agent, local, remote, wanted, part=goes_on)
        self._read_network(asked, partial(self._came, part))

    def _came(self, part: Part, event: Landed | ReadFailed) -> None:
        if isinstance(event, ReadFailed):
            self._part_ended(part, event.reason)
        elif part.read.board is not None and not part.read.failure:
            part.step = Step.CHECKED
            self._await(part.read.board, part)
        else:
            self._arrived(part)

    def _arrived(self, part: Part) -> None:
        """What it read is what it asked for."""
        if part.slot is None or part.read.failure:
            self._part_ended(part, "")
            return
        part.step = Step.COPIED
        _, target, length = part.rows
        sources = packed(self._buffers.base + self._buffers.slot_offset(part.slot), length)
        targets = target + np.uint64(part.read.request.local_base)
        self._copy(targets, sources, length, partial(self._part_ended, part))

    def _part_ended(self, part: Part, failure: str) -> None:
        """Nothing writes for it any more."""
        read = part.read
        read.parts.discard(part)
        self._slotless.pop(part, None)
        self._give_slot_back(part)
        if read.board is not None:
            read.board.waiting.discard(part)
            if part.step is not Step.COPIED:
                self._finish(read.board, part)
        self._queue.ended(part.piece)
        if failure:
            self._fail(read, failure)
        else:
            self._end_if_done(read)
        self._pump()

    def _fail(self, read: Read, reason: str) -> None:
        """It will not land: what waits ends now, what is on its way when nothing writes for it."""
        read.failure = read.failure or reason
        self._queue.drop(read.request.read)
        for part in [part for part in read.parts if part.step in AT_REST]:
            self._part_ended(part, "")
        self._end_if_done(read)

    def _end_if_done(self, read: Read) -> None:
        number = read.request.read
        if read.parts or self._queue.waiting(number) or self._reads.get(number) is not read:
            return
        del self._reads[number]
        if read.failure:
            self._emit(ReadFailed(number, read.failure, read.aborted))
        else:
            self._emit(Landed(number, time.perf_counter() - read.started))
        read.peer.reads.discard(number)
        if not read.peer.reads:
            self._idle(read.peer.agent)

    # --- boards -----------------------------------------------------------------------------------------------------

    def _await(self, board: Board, part: Part) -> None:
        part.looks = board.looks
        board.waiting.add(part)
        self._look(board)

    def _look(self, board: Board) -> None:
        """Reads the board, for what waits now."""
        if board.looking or not board.waiting:
            return
        board.looking = True
        if not self._buffers.rows or self._rows_of[board.agent] == _ROWS_PER_PEER:
            self._loop.call_later(_LOOK_SECONDS, self._look_again, board)
            return
        row = self._buffers.rows.pop()
        self._rows_of[board.agent] += 1
        board.looks += 1
        rows = 0, self._buffers.row_offset(row), board.pool.lines * LINE_BYTES
        lines = Descriptors(*(np.array([number], np.uint64) for number in rows))
        asked = ReadRequest(-next(self._numbers), board.agent, self._buffers.base, board.pool.arena, lines)
        self._read_network(asked, partial(self._seen, board, row))

    def _look_again(self, board: Board) -> None:
        board.looking = False
        self._look(board)

    def _seen(self, board: Board, row: int, event: Landed | ReadFailed) -> None:
        lines = self._buffers.lines(row, board.pool.lines) if isinstance(event, Landed) else []
        self._buffers.rows.append(row)
        self._rows_of -= Counter([board.agent])
        failure = ""
        if isinstance(event, ReadFailed):
            failure = f"its board cannot be read: {event.reason}"
        elif lines[0] != heading(board.pool.token):
            failure = f"agent {board.agent!r} has taken the pool back"
        where = {line: window for window, line in enumerate(lines[1:])}
        for part in [part for part in board.waiting if part.looks < board.looks]:
            if part not in board.waiting:
                continue  # its read has failed with another part of it
            if failure:
                self._part_ended(part, failure)
            else:
                self._decide(board, part, where)
        board.looking = bool(board.waiting)
        if board.looking:
            self._loop.call_later(_LOOK_SECONDS, self._look_again, board)

    def _decide(self, board: Board, part: Part, where: dict[bytes, int]) -> None:
        window = where.get(tag(board.secret, part.number, State.READY))
        if part.step is Step.CHECKED and window == part.window:
            board.waiting.discard(part)
            self._finish(board, part)
            part.step = Step.COPIED
            self._arrived(part)
        elif part.step is Step.CHECKED and part.read.aborted:
            self._part_ended(part, _ABORTED)
        elif part.step is Step.CHECKED:  # its window was taken back: others waited for too long
            self._finish(board, part)
            self._ask(part, board)
        elif window is not None:
            board.waiting.discard(part)
            part.window = window
            self._read_into_slot(part)
        else:
            for state, reason in _REASONS.items():
                if tag(board.secret, part.number, state) in where:
                    self._part_ended(part, f"agent {board.agent!r} staged nothing: {reason}")
                    return
            if self._loop.time() >= part.again:
                self._finish(board, part)
                self._ask(part, board)

    # --- the network ------------------------------------------------------------------------------------------------

    def _read_network(self, asked: ReadRequest, ended: _Ended) -> None:
        self._handlers[asked.read] = ended
        self._network.read(asked)
