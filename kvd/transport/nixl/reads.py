"""The open reads of one NIXL agent: what is posted, and how each read ends.

A slice is *posted* from the moment NIXL takes it until NIXL says that it is done, or it has failed and its handle could
be released. NIXL cannot cancel a slice and may write until then, so a read ends only when nothing of it is posted and
nothing waits.

What NIXL is given for a read are lists, which are prepared chunk by chunk as slices are posted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from kvd import limits
from kvd.errors import ErrorCode, refusal
from kvd.transport.interface import AgentEvent, Landed, ReadFailed, ReadRequest
from kvd.transport.nixl.peers import Peer, Peers
from kvd.transport.nixl.poll_interval import PROMPT
from kvd.transport.nixl.ucx import text_of
from kvd.transport.slices import U64, Chunk, Slice, SliceQueue

if TYPE_CHECKING:
    from kvd.transport.nixl.ucx import UcxEndpoints


@dataclass(slots=True, eq=False)
class _Lists:
    """Both sides of a chunk, and how many of its slices are posted."""

    local: Any
    remote: Any
    posted: int = 0

    def release(self) -> None:
        self.local.release()
        self.remote.release()


class PreparedRead:
    """The prepared lists of one read.

    A chunk is prepared when its first slice is posted: preparing 4096 descriptors takes 0.3 ms, for which other reads
    wait. Slices come in order, so a chunk's lists are released once a later chunk has begun and the last of its own
    slices has ended; even a read of millions of descriptors holds few lists at a time.
    """

    def __init__(self, nixl: Any, request: ReadRequest) -> None:
        self._nixl = nixl
        self._request = request
        self._lists: dict[Chunk, _Lists] = {}
        self._latest: Chunk | None = None

    def transfer_of(self, piece: Slice) -> Any:
        """A NIXL transfer handle of one slice, for the caller to release; raises NIXL's errors."""
        lists = self._lists.get(piece.chunk) or self._prepare(piece.chunk)
        indices = np.arange(piece.start, piece.stop, dtype=np.int32)
        lists.posted += 1
        return self._nixl.make_prepped_xfer("READ", lists.local, indices, lists.remote, indices)

    def slice_ended(self, piece: Slice) -> None:
        """A slice passed to `transfer_of` has ended."""
        lists = self._lists.get(piece.chunk)
        if lists is not None:
            lists.posted -= 1
            self._release_if_done(piece.chunk)

    def release(self) -> None:
        """Releases what is left, once nothing more will be posted."""
        for lists in self._lists.values():
            lists.release()
        self._lists.clear()

    def _prepare(self, chunk: Chunk) -> _Lists:
        request = self._request
        local = self._side("NIXL_INIT_AGENT", chunk.dst, request.local_base, chunk.length)
        try:
            remote = self._side(request.agent, chunk.src, request.remote_base, chunk.length)
        except Exception:
            local.release()
            raise
        before, self._latest = self._latest, chunk
        if before is not None:
            self._release_if_done(before)
        lists = self._lists[chunk] = _Lists(local, remote)
        return lists

    def _release_if_done(self, chunk: Chunk) -> None:
        lists = self._lists.get(chunk)
        if lists is not None and not lists.posted and chunk is not self._latest:
            self._lists.pop(chunk).release()

    def _side(self, agent: str, offset: U64, base: int, length: U64) -> Any:
        rows = np.zeros((len(length), 3), dtype=np.uint64)  # address, bytes, device
        np.add(offset, np.uint64(base), out=rows[:, 0])
        rows[:, 1] = length
        return self._nixl.prep_xfer_dlist(agent, rows, mem_type="DRAM")


FLUSH_BYTES = 64 * limits.KIB
"""Events wait while slices smaller than this are posted, for `RECENT` at most, so that a burst wakes the loop once.
Most take 10 to 20 us, but scattered ones of as few bytes 2.5 ms."""

_DISCONNECTED = frozenset({"nixlRemoteDisconnectError"})


class _Read(Struct, eq=False):
    """`posted` counts what NIXL has of it; `failure` is why the read will not land."""

    request: ReadRequest
    peer: Peer
    prepared: PreparedRead
    posted: int = 0
    started: float = 0.0
    failure: str = ""
    aborted: bool = False


class _Posted(Struct, eq=False):
    """A slice that NIXL has. After a `failure` only its handle is left."""

    read: _Read
    piece: Slice
    handle: Any
    failure: Exception | None = None


class NixlStateError(Exception):
    """NIXL returned the state of a slice as an error instead of raising one."""


class Reads:
    """The open reads of the agent `nixl`, and its peers, which take their reads along when they are lost.

    `addresses` has where our pools lie in this process, by their address in the daemon.
    """

    def __init__(
        self,
        nixl: Any,
        failures: tuple[type[Exception], ...],
        endpoints: UcxEndpoints,
        addresses: Mapping[int, int],
        *,
        emit: Callable[[AgentEvent], None],
        flush: Callable[[], None],
    ) -> None:
        self._nixl = nixl
        self._failures = failures
        self._addresses = addresses
        self.peers = Peers(nixl, failures, endpoints, emit=emit, fail_read=self._fail)
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

    def begin(self, asked: ReadRequest) -> None:
        """Queues a read, whose bases are addresses in the two daemons."""
        peer = self.peers.find(asked.agent)
        if peer is None:
            reason = f"agent {asked.agent!r} is not known: add it before reading from it"
            self._emit(ReadFailed(asked.read, reason))
            return
        here, there = self._addresses.get(asked.local_base), peer.parts.addresses.get(asked.remote_base)
        if here is None or there is None:
            whose, base = (
                ("we have", asked.local_base)
                if here is None
                else (f"agent {asked.agent!r} announced", asked.remote_base)
            )
            self._emit(ReadFailed(asked.read, f"{whose} no pool at {base:#x}"))
            return
        request = replace(asked, local_base=here, remote_base=there)
        if not self._slices.add(request):
            self._emit(Landed(request.read, 0.0))
            return
        if request.read in self._reads:
            raise refusal(ErrorCode.INTERNAL, f"read {request.read} was asked for twice")
        self._reads[request.read] = _Read(request, peer, PreparedRead(self._nixl, request))
        peer.reads.add(request.read)

    def abort(self, read: int) -> None:
        """Drops what is not posted."""
        if self._slices.waiting(read):
            self._reads[read].aborted = True
            self._fail(read, "aborted")

    def close(self, seconds: float) -> None:
        """Waits `seconds` at most for what is posted, and then disconnects, unless NIXL may still write."""
        for key in self._reads:
            self._slices.drop(key)
        agents = self.peers.disown()
        deadline = time.monotonic() + seconds
        while self._posted and time.monotonic() < deadline:
            self._nixl.get_new_notifs()
            if not self.check_posted(len(self._posted)):
                time.sleep(PROMPT)
        if not self._posted:
            for agent in agents:
                self.peers.disconnect(agent)

    # --- posts ------------------------------------------------------------------------------------------------------

    def post_next(self) -> bool:
        """Posts one slice; False if none may be posted."""
        piece = self._slices.pick()
        if piece is None:
            return False
        if piece.bytes >= FLUSH_BYTES:
            self._flush()
        self._post(self._reads[piece.request.read], piece)
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

    def _post(self, read: _Read, piece: Slice) -> None:
        read.posted += 1
        read.started = read.started or time.perf_counter()
        try:
            handle = read.prepared.transfer_of(piece)
        except self._failures as error:
            self._slice_ended(read, piece, error)
            return
        posted = _Posted(read, piece, handle)
        if not self._has_ended(posted, self._nixl.transfer):
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

    def _slice_ended(self, read: _Read, piece: Slice, failure: Exception | None) -> None:
        read.posted -= 1
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
        read.prepared.release()
        del self._reads[key]
        if read.failure:
            self._emit(ReadFailed(key, read.failure, read.aborted))
        else:
            self._emit(Landed(key, time.perf_counter() - read.started))
        self.peers.read_ended(read.peer, key)
