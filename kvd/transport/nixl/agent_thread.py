"""What runs on the NIXL transport's thread: registrations, reads and the slices that are posted.

A slice is *posted* from the moment NIXL takes it until NIXL says that it is done, or has failed and its handle could be
released; NIXL has no cancel, and until then it may write. A read ends when nothing of it is posted and nothing waits.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from kvd import limits
from kvd.errors import ErrorCode, InternalError
from kvd.transport.interface import (
    Answered,
    Deregistered,
    Described,
    Event,
    Landed,
    ReadFailed,
    Registered,
    RegisterFailed,
)
from kvd.transport.nixl.peers import Peer, Peers, text_of
from kvd.transport.nixl.poll_interval import PROMPT, RECENT, PollInterval
from kvd.transport.nixl.prepared import PreparedRead
from kvd.transport.nixl.queue import Slice, SliceQueue, Slices
from kvd.transport.nixl.stamp_reader import StampReader
from kvd.transport.nixl.ucx_endpoints import UcxEndpoints
from kvd.transport.path import is_copied

if TYPE_CHECKING:
    from kvd.plan import Descriptors

Command = Callable[[], None]

CHECKS_PER_POST = 32
"""Slices looked at between two posts: thousands of small ones may be posted, and a look costs 1 us."""

FLUSH_BYTES = 64 * limits.KIB
"""Events wait while smaller slices than this are posted, 10 to 20 us each: a burst of them wakes the loop once."""

SMALL_BYTES = 64 * limits.KIB
SMALL_DESCRIPTORS = 16
"""Reads up to this are made at once where the peer is on the same host: 20 to 100 us, as long as waking a thread up."""

_DISCONNECTED = frozenset({"nixlRemoteDisconnectError"})
_abandoned: list[object] = []
"""Agents stopped with slices posted: to destroy one would free what UCX still uses."""


class _Read(Struct, eq=False):
    """`posted` counts slices that NIXL has; `failure` is why the read will not land."""

    key: int
    peer: Peer
    prepared: PreparedRead
    posted: int = 0
    started: float = 0.0
    failure: str = ""
    aborted: bool = False
    waited: bool = False
    """A slice was not done when its post returned."""
    stamp: int = 0
    """Address of the stamp to read last, 0 for none."""
    word: int | None = None
    """Where the stamp lands, which is the last that is posted."""
    seconds: float = 0.0
    """From the first post to the last byte of a descriptor."""

    @property
    def in_post(self) -> bool:
        """Whether the kernel has copied all of it: its lanes say by whom, and its posts that nobody was waited for."""
        return not self.waited and is_copied(self.peer.path)


class _Posted(Struct, eq=False):
    """What NIXL has: a slice, else a whole read or a stamp; with `failure` it only waits for its handle's release."""

    read: _Read
    piece: Slice | None
    handle: Any
    failure: Exception | None = None


class NixlStateError(Exception):
    """NIXL returned the state of a slice as an error instead of raising one."""


def _look() -> None:
    """A command that only wakes the thread."""


class AgentThread:
    """Commands in, events out. Every method but `commands.put` and `read_at_once` belongs to the thread in `run`."""

    def __init__(self, agent: Any, failures: tuple[type[Exception], ...], lanes: UcxEndpoints | None) -> None:
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._nixl = agent
        self._failures = failures
        self._stamp_reader = StampReader(agent)
        self._peers = Peers(agent, failures, lanes, self._stamp_reader, emit=self._say, fail_read=self._fail_read)
        self._emit: Callable[[Event], None]
        self._flush: Callable[[], None]
        self._pace = PollInterval()
        self._slices = SliceQueue()
        self._pools: dict[int, Any] = {}
        self._regions: dict[int, tuple[int, int, int]] = {}
        """(address, bytes, device), by pool."""
        self._reads: dict[int, _Read] = {}
        self._posted: deque[_Posted] = deque()
        self.turn = threading.Lock()
        """Held by whoever touches NIXL, or anything of the above."""
        self._stop_seconds: float | None = None

    def run(self, emit: Callable[[Event], None], flush: Callable[[], None]) -> None:
        """Serves until `stop`; what escapes it is a defect. Emitted events may wait for the next flush."""
        self._emit, self._flush = emit, flush
        busy = False
        looked = 0.0
        while self._stop_seconds is None:
            command = self._next_command(0.0 if busy else self._pace.seconds(time.monotonic(), bool(self._posted)))
            with self.turn:
                self._obey(command)
                posted = self._post_next()
                ended = self._check_posted(CHECKS_PER_POST if posted else len(self._posted))
                if not posted:
                    flush()
                now = time.monotonic()
                if not posted or now - looked >= (PROMPT if self._pace.readers_expected else RECENT):
                    self._nixl.get_new_notifs()  # the network's progress, for who reads from us; no notification comes
                    looked = now
                busy = command is not None or posted or ended
                if ended or self._posted:
                    self._pace.touch(now)
        self._shut_down(self._stop_seconds)

    # --- commands ---------------------------------------------------------------------------------------------------

    def register(self, pool: int, base: int, size: int) -> None:
        """As `Transport.register`."""
        region = (base, size, 0)
        try:
            self._pools[pool] = self._nixl.register_memory(np.array([region], dtype=np.uint64), mem_type="DRAM")
        except self._failures as error:
            self._emit(RegisterFailed(pool, f"{text_of(error)} for {size} bytes at {base:#x}"))
        else:
            self._regions[pool] = region
            self._emit(Registered(pool, self._nixl.get_agent_metadata()))

    def deregister(self, pool: int) -> None:
        """As `Transport.deregister`."""
        self._nixl.deregister_memory(self._pools.pop(pool))
        del self._regions[pool]
        self._emit(Deregistered(pool, self._nixl.get_agent_metadata()))

    def describe(self, pools: tuple[int, ...]) -> None:
        """As `Transport.describe`."""
        regions = [self._regions[pool] for pool in pools if pool in self._regions]
        rows = np.array(regions, dtype=np.uint64).reshape(-1, 3)
        described = self._nixl.get_reg_descs(rows, mem_type="DRAM")
        self._emit(Described(pools, self._nixl.get_partial_agent_metadata(described, True, ["UCX"])))

    def add_peer(self, agent: str, metadata: bytes, path: str | None = None) -> None:
        """As `Transport.add_peer`; `path` is told where another agent of the process has asked for it."""
        self.expect_connection()
        self._peers.add(agent, metadata, path)

    def remove_peer(self, agent: str) -> None:
        """As `Transport.remove_peer`."""
        self._peers.remove(agent)

    def read_at_once(
        self, read: int, agent: str, local_base: int, remote_base: int, descriptors: Descriptors, *, stamp: int = 0
    ) -> bool:
        """On the caller's thread, where the read is small, copied in its post, and nothing is before it; else False.

        Without the books that are kept of other reads, unless it does not end as expected.
        """
        if descriptors.count > SMALL_DESCRIPTORS or descriptors.bytes > SMALL_BYTES:
            return False
        if 0 in [size for _, _, size in descriptors.copies]:
            return False
        if not self.turn.acquire(blocking=False):
            return False
        try:
            peer = self._peers.find(agent)
            if peer is None or not peer.direct or self._slices or not self.commands.empty():
                return False
            prepared = PreparedRead(self._nixl, agent, local_base, remote_base)
            begun = _Read(read, peer, prepared, started=time.perf_counter(), stamp=stamp)
            if self._copies(begun, partial(prepared.transfer_of_all, descriptors)):
                begun.seconds = time.perf_counter() - begun.started
                begun.word = self._stamp_reader.take() if stamp else None
                if begun.word is None or self._copies(begun, partial(self._stamp_of, begun)):
                    self._say_landed(begun)
            return True
        finally:
            self.turn.release()

    def _copies(self, read: _Read, prepare: Callable[[], Any]) -> bool:
        """Posts what `prepare` makes a handle of; whether that was all. If not the read goes on as others do."""
        handle: Any = None
        failure: Exception | None = None
        try:
            handle = prepare()
            copied: bool = self._nixl.transfer(handle) == "DONE"
        except self._failures as error:
            copied, failure = False, error
        if copied:
            handle.release()
            return True
        self._open(read).posted += 1
        if handle is None:
            self._slice_ended(read, None, failure)
        else:
            read.waited = True
            self._posted.append(_Posted(read, None, handle, failure))
            self.commands.put(_look)
        return False

    def read(self, agent: str, local_base: int, remote_base: int, slices: Slices, *, stamp: int = 0) -> None:
        """As `Transport.read`, of what it gets of `slices`."""
        read = slices.read
        peer = self._peers.find(agent)
        if peer is None:
            self._emit(ReadFailed(read, f"agent {agent!r} is not known: add it before reading from it"))
        elif self._slices.add(agent, slices):
            self._open(_Read(read, peer, PreparedRead(self._nixl, agent, local_base, remote_base), stamp=stamp))
        else:
            self._emit(Landed(read, 0.0))

    def _open(self, read: _Read) -> _Read:
        if read.key in self._reads:
            raise InternalError(ErrorCode.INTERNAL, f"read {read.key} was asked for twice")
        self._reads[read.key] = read
        read.peer.reads.add(read.key)
        return read

    def abort(self, read: int) -> None:
        """As `Transport.abort`."""
        opened = self._reads.get(read)
        if opened and self._slices.waiting(read):
            opened.aborted = True
            self._fail(opened, "aborted")

    def expect_connection(self) -> None:
        """As `Transport.expect_connection`."""
        self._pace.touch(time.monotonic())

    def expect_readers(self, expected: bool) -> None:
        """As `Transport.expect_readers`."""
        self._pace.readers_expected = expected

    def ping(self, number: int) -> None:
        """As `Transport.ping`."""
        self._emit(Answered(number))

    def stop(self, seconds: float) -> None:
        """Makes `run` return: no new posts, and `seconds` for those that are out."""
        self._stop_seconds = seconds

    # --- the loop ---------------------------------------------------------------------------------------------------

    def _next_command(self, seconds: float) -> Command | None:
        """Waits for a command; None where none came."""
        try:
            return self.commands.get(timeout=seconds) if seconds else self.commands.get_nowait()
        except queue.Empty:
            return None

    def _obey(self, command: Command | None) -> None:
        """Runs a command and those that came after it."""
        if command is None:
            return
        command()
        for _ in range(self.commands.qsize()):
            self.commands.get_nowait()()

    def _post_next(self) -> bool:
        """Posts one slice; False where none may be posted."""
        piece = self._slices.pick()
        if piece is None:
            return False
        if piece.bytes >= FLUSH_BYTES:
            self._flush()
        read = self._reads[piece.read]
        self._post(read, piece, partial(read.prepared.transfer_of, piece))
        return True

    def _post(self, read: _Read, piece: Slice | None, prepare: Callable[[], Any]) -> None:
        """Posts what `prepare` makes a handle of: a slice, or (without one) the whole read or its stamp."""
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

    def _check_posted(self, most: int) -> bool:
        """Asks NIXL for the state of `most` slices, the oldest first; whether one ended."""
        ended = False
        for _ in range(min(most, len(self._posted))):
            posted = self._posted.popleft()
            if self._has_ended(posted, self._nixl.check_xfer_state):
                ended = True
            else:
                self._posted.append(posted)
        return ended

    def _has_ended(self, posted: _Posted, ask: Callable[[Any], str]) -> bool:
        """Whether nothing writes for this slice any more, as NIXL answers `ask`; if so, accounts for it."""
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

    def _slice_ended(self, read: _Read, piece: Slice | None, failure: Exception | None) -> None:
        read.posted -= 1
        if piece is not None:
            self._slices.ended(read.peer.agent, piece)
            read.prepared.slice_ended(piece)
        if failure is not None and type(failure).__name__ in _DISCONNECTED and not read.peer.lost:
            self._peers.lost(read.peer, text_of(failure))
        elif failure is not None:
            self._fail(read, text_of(failure))
        else:
            self._end_if_quiet(read)

    # --- ends -------------------------------------------------------------------------------------------------------

    def _say(self, event: Event) -> None:
        self._emit(event)

    def _fail_read(self, read: int, reason: str) -> None:
        self._fail(self._reads[read], reason)

    def _fail(self, read: _Read, reason: str) -> None:
        """The read will not land: drops what is not posted."""
        read.failure = read.failure or reason
        self._slices.drop(read.key)
        self._end_if_quiet(read)

    def _end_if_quiet(self, read: _Read) -> None:
        if read.posted or self._slices.waiting(read.key) or read.key not in self._reads:
            return
        if read.word is None:
            read.seconds = time.perf_counter() - read.started
            read.prepared.release()
            if not read.failure and read.stamp and self._post_stamp(read):
                return
        del self._reads[read.key]
        if read.failure:
            if read.word is not None:
                self._stamp_reader.give_back(read.word)
            self._emit(ReadFailed(read.key, read.failure, read.aborted))
        else:
            read.peer.direct = read.in_post
            self._say_landed(read)
        self._peers.read_ended(read.peer, read.key)

    def _say_landed(self, read: _Read) -> None:
        stamp = 0 if read.word is None else self._stamp_reader.give_back(read.word)
        self._emit(Landed(read.key, read.seconds, in_post=read.in_post, stamp=stamp))

    def _post_stamp(self, read: _Read) -> bool:
        """All bytes are in place: posts the stamp, past the queue since it is a word. False where there is no room."""
        read.word = self._stamp_reader.take()
        if read.word is None:
            return False
        self._post(read, None, partial(self._stamp_of, read))
        return True

    def _stamp_of(self, read: _Read) -> Any:
        """A NIXL transfer handle of its stamp; raises NIXL's errors."""
        assert read.word is not None  # noqa: S101 - it was taken for this
        return self._stamp_reader.transfer_of(read.word, read.peer.agent, read.stamp)

    def _shut_down(self, seconds: float) -> None:
        for key in list(self._reads):
            self._slices.drop(key)
        agents = self._peers.disown()
        deadline = time.monotonic() + seconds
        while self._posted and time.monotonic() < deadline:
            self._nixl.get_new_notifs()
            if not self._check_posted(len(self._posted)):
                time.sleep(PROMPT)
        if self._posted:
            _abandoned.append(self._nixl)
            return
        for read in self._reads.values():
            read.prepared.release()
        for agent in agents:
            self._peers.disconnect(agent)
        for registration in self._pools.values():
            self._nixl.deregister_memory(registration)
        self._stamp_reader.close()
        del self._nixl, self._stamp_reader, self._peers
