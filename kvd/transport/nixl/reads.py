"""The open reads of one NIXL agent: what is posted, and how each read ends.

A slice is *posted* from the moment NIXL takes it until NIXL says that it is done, or it has failed and its handle could
be released. NIXL cannot cancel a slice and may write until then, so a read ends only when nothing of it is posted and
nothing waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from kvd import limits
from kvd.errors import ErrorCode, InternalError
from kvd.transport.interface import Event, Landed, ReadFailed, ReadRequest
from kvd.transport.nixl.peers import Peer, Peers, text_of
from kvd.transport.nixl.poll_interval import PROMPT
from kvd.transport.nixl.prepared import PreparedRead
from kvd.transport.nixl.queue import Slice, SliceQueue, Slices
from kvd.transport.nixl.stamp_reader import StampReader
from kvd.transport.path import is_copied

if TYPE_CHECKING:
    from kvd.plan import Descriptors
    from kvd.transport.nixl.ucx_endpoints import UcxEndpoints

FLUSH_BYTES = 64 * limits.KIB
"""Events wait while slices smaller than this are posted, 10 to 20 us each, so that a burst wakes the loop once."""

SMALL_BYTES = 64 * limits.KIB
SMALL_DESCRIPTORS = 16
"""Reads up to this may be posted on the loop if the kernel copies them: 20 to 100 us, like waking the thread up."""

_DISCONNECTED = frozenset({"nixlRemoteDisconnectError"})


def is_small(descriptors: Descriptors) -> bool:
    """Whether a read is short enough to be posted as a whole, on the loop. NIXL takes no empty descriptors."""
    if descriptors.count > SMALL_DESCRIPTORS or descriptors.bytes > SMALL_BYTES:
        return False
    return 0 not in [size for _, _, size in descriptors.copies]


class _Read(Struct, eq=False):
    """`posted` counts what NIXL has of it; `failure` is why the read will not land."""

    request: ReadRequest
    peer: Peer
    prepared: PreparedRead
    posted: int = 0
    started: float = 0.0
    failure: str = ""
    aborted: bool = False
    waited: bool = False
    """A post returned before its bytes were there."""
    word: int | None = None
    """Where the stamp is read to; it is posted last."""
    seconds: float = 0.0
    """From the first post to the last byte of a descriptor."""

    @property
    def in_post(self) -> bool:
        """Whether the kernel has copied all of it: the path says what copies, the posts that nothing was waited for."""
        return not self.waited and is_copied(self.peer.path)


class _Posted(Struct, eq=False):
    """What NIXL has: a slice or, without one, a whole read or a stamp. After a `failure` only its handle is left."""

    read: _Read
    piece: Slice | None
    handle: Any
    failure: Exception | None = None


class NixlStateError(Exception):
    """NIXL returned the state of a slice as an error instead of raising one."""


class Reads:
    """The open reads of the agent `nixl`, and its peers, which take their reads along when they are lost."""

    def __init__(
        self,
        nixl: Any,
        failures: tuple[type[Exception], ...],
        endpoints: UcxEndpoints | None,
        *,
        emit: Callable[[Event], None],
        flush: Callable[[], None],
    ) -> None:
        self._nixl = nixl
        self._failures = failures
        self._stamps = StampReader(nixl)
        self.peers = Peers(nixl, failures, endpoints, self._stamps, emit=emit, fail_read=self._fail)
        self._emit = emit
        self._flush = flush
        self._slices = SliceQueue()
        self._reads: dict[int, _Read] = {}
        self._posted: deque[_Posted] = deque()

    @property
    def in_flight(self) -> int:
        """How many slices are posted."""
        return len(self._posted)

    # --- commands ---------------------------------------------------------------------------------------------------

    def begin(self, slices: Slices) -> None:
        """Queues as much of a read as it gets of `slices`."""
        request = slices.request
        peer = self.peers.find(request.agent)
        if peer is None:
            reason = f"agent {request.agent!r} is not known: add it before reading from it"
            self._emit(ReadFailed(request.read, reason))
        elif self._slices.add(slices):
            self._open(request, peer)
        else:
            self._emit(Landed(request.read, 0.0))

    def post_now(self, request: ReadRequest) -> bool:
        """Posts a small read as a whole; False if others come first, or if the kernel might not copy it at once."""
        peer = self.peers.find(request.agent)
        if peer is None or not peer.in_post or self._slices:
            return False
        read = self._open(request, peer)
        self._post(read, None, read.prepared.transfer_of_all)
        return True

    def abort(self, read: int) -> None:
        """Drops what is not posted."""
        if self._slices.waiting(read):
            self._reads[read].aborted = True
            self._fail(read, "aborted")

    def close(self, seconds: float) -> bool:
        """Waits `seconds` at most for what is posted and releases everything; False if NIXL may still write."""
        for key in self._reads:
            self._slices.drop(key)
        agents = self.peers.disown()
        deadline = time.monotonic() + seconds
        while self._posted and time.monotonic() < deadline:
            self._nixl.get_new_notifs()
            if not self.check_posted(len(self._posted)):
                time.sleep(PROMPT)
        if self._posted:
            return False
        for read in self._reads.values():
            read.prepared.release()
        for agent in agents:
            self.peers.disconnect(agent)
        self._stamps.close()
        return True

    def _open(self, request: ReadRequest, peer: Peer) -> _Read:
        if request.read in self._reads:
            raise InternalError(ErrorCode.INTERNAL, f"read {request.read} was asked for twice")
        read = _Read(request, peer, PreparedRead(self._nixl, request))
        self._reads[request.read] = read
        peer.reads.add(request.read)
        return read

    # --- posts ------------------------------------------------------------------------------------------------------

    def post_next(self) -> bool:
        """Posts one slice; False if none may be posted."""
        piece = self._slices.pick()
        if piece is None:
            return False
        if piece.bytes >= FLUSH_BYTES:
            self._flush()
        read = self._reads[piece.request.read]
        self._post(read, piece, partial(read.prepared.transfer_of, piece))
        return True

    def check_posted(self, most: int) -> bool:
        """Asks NIXL for the state of `most` slices, the oldest first; whether one ended."""
        ended = False
        for _ in range(min(most, len(self._posted))):
            posted = self._posted.popleft()
            if self._has_ended(posted, self._nixl.check_xfer_state):
                ended = True
            else:
                self._posted.append(posted)
        return ended

    def _post(self, read: _Read, piece: Slice | None, prepare: Callable[[], Any]) -> None:
        """Posts the handle that `prepare` makes: of a slice or, without one, of the whole read or its stamp."""
        read.posted += 1
        read.started = read.started or time.perf_counter()
        try:
            handle = prepare()
        except self._failures as error:
            self._slice_ended(read, piece, error)
            return
        posted = _Posted(read, piece, handle)
        if not self._has_ended(posted, self._nixl.transfer):
            read.waited = True
            self._posted.append(posted)

    def _has_ended(self, posted: _Posted, ask: Callable[[Any], str]) -> bool:
        """Whether nothing writes for this slice any more, by NIXL's answer to `ask`; if so, accounts for it."""
        if posted.failure is None:
            try:
                state = ask(posted.handle)
            except self._failures as error:
                posted.failure = error
            else:
                if state == "DONE":
                    self._slice_ended(posted.read, posted.piece, None)
                    posted.handle.release()
                    return True
                if state == "PROC":
                    return False
                posted.failure = NixlStateError(f"state {state}")
        try:
            posted.handle.release()
        except self._failures:
            return False  # refused while a part of the slice is active
        self._slice_ended(posted.read, posted.piece, posted.failure)
        return True

    # --- ends -------------------------------------------------------------------------------------------------------

    def _slice_ended(self, read: _Read, piece: Slice | None, failure: Exception | None) -> None:
        read.posted -= 1
        if piece is not None:
            self._slices.ended(piece)
            read.prepared.slice_ended(piece)
        if failure is None:
            self._end_if_done(read)
        elif type(failure).__name__ in _DISCONNECTED and not read.peer.lost:
            self.peers.lost(read.peer, text_of(failure))
        else:
            self._fail(read.request.read, text_of(failure))

    def _fail(self, key: int, reason: str) -> None:
        """The read will not land: drops what is not posted."""
        read = self._reads[key]
        read.failure = read.failure or reason
        self._slices.drop(key)
        self._end_if_done(read)

    def _end_if_done(self, read: _Read) -> None:
        key = read.request.read
        if read.posted or self._slices.waiting(key):
            return
        if read.word is None:
            read.seconds = time.perf_counter() - read.started
            read.prepared.release()
            if not read.failure and read.request.stamp and self._post_stamp(read):
                return
        del self._reads[key]
        stamp = 0 if read.word is None else self._stamps.give_back(read.word)
        if read.failure:
            self._emit(ReadFailed(key, read.failure, read.aborted))
        else:
            read.peer.in_post = read.in_post
            self._emit(Landed(key, read.seconds, in_post=read.in_post, stamp=stamp))
        self.peers.read_ended(read.peer, key)

    def _post_stamp(self, read: _Read) -> bool:
        """All bytes are in place: posts the stamp, a mere word, ahead of the queue. False if there is no free word."""
        read.word = self._stamps.take()
        if read.word is None:
            return False
        self._post(read, None, partial(self._stamps.transfer_of, read.word, read.peer.agent, read.request.stamp))
        return True
