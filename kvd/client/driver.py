"""Turns the client's wheels: moves frames between the core and the connection, and connects again after a loss.

Nothing here blocks. `Worker` waits with poll(2) on the descriptors, `AsyncWorker` with its loop's readers; both
call `step` when something is there or `next_timer` has come.

When the session ends, nothing is known but that: the daemon may have hung up and live. It is taken for gone, and what
it was asked for ends, when its process has exited, which the descriptor says that came with the pool, also from another
PID namespace. Until then pulls stay open, up to their own deadline, and a daemon of another incarnation on that path is
not attached to. If the same incarnation answers, nothing was lost.
"""

import math
import os
import select
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvd.client.connection import Connection, Phase
from kvd.client.core import Core
from kvd.client.pool import PoolMap
from kvd.errors import BadRequest, ErrorCode, InternalError, KvdError, Unavailable
from kvd.protocol.worker import Attach, Attached, Detached

FIRST_RETRY_SECONDS = 0.01
LAST_RETRY_SECONDS = 0.5
"""Attempts to connect again come this far apart at first and at last, doubling."""

STABLE_SECONDS = 1.0
"""A session that lasted as long was a good one: the next loss is answered at once."""

FRAMES_PER_STEP = 256
"""Frames taken in by one step, which bounds what one `poll` costs a step of the engine."""


class Poller(Protocol):
    """What of `select.poll` a driver uses."""

    def poll(self, milliseconds: float, /) -> list[tuple[int, int]]:
        """(descriptor, events) of those that are ready."""

    def register(self, fileno: int, events: int, /) -> None:
        """Waits on one more."""

    def unregister(self, fileno: int, /) -> None:
        """Waits on one less."""


@dataclass(frozen=True, slots=True)
class Dependencies:
    """What a driver works with; the simulator has its own. `map(descriptor, bytes)` takes the descriptor over."""

    connection: Connection
    poller: Poller
    map: Callable[[int, int], PoolMap]
    instance: bytes


class Driver:
    """One worker's session, its pool and its requests; see the module's text."""

    def __init__(
        self, path: str, name: str, spec: bytes, pool_bytes: int, dependencies: Dependencies | None = None
    ) -> None:
        dependencies = dependencies or Dependencies(Connection(path), select.poll(), PoolMap, os.urandom(16))
        self.core = Core(name)
        self.pool: PoolMap | None = None
        self.failed: KvdError | None = None
        """Why the daemon will not have us any more; requests raise it."""
        self.detached = False
        self.on_descriptors: Callable[[tuple[int, ...]], None] = lambda _filenos: None
        """Told what to wait on for reading, whenever that changes."""
        self._connection = dependencies.connection
        self._path = path
        self._attach = Attach(name, dependencies.instance, spec)
        self._map = dependencies.map
        self._pool_bytes = pool_bytes
        self._poller = dependencies.poller
        self._watched: tuple[int, ...] = ()
        self._closed = False
        self._outbox: deque[bytes] = deque()
        self._last_error: KvdError | None = None
        self._attached_at = 0.0
        self._retry_at = 0.0
        self._retry_after = 0.0

    # --- what a front needs -----------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether requests can be made."""
        return self._connection.phase is Phase.ATTACHED

    @property
    def unread(self) -> bool:
        """Whether to call `step` before waiting: what is there already wakes nobody up."""
        return self._connection.unread

    @property
    def unsent(self) -> bool:
        """Whether to call `step` again soon although nothing is readable."""
        return self._connection.unsent or bool(self._outbox)

    def next_timer(self) -> float:
        """When `step` has something to do although nothing is readable, on the clock of `time.monotonic`."""
        retry = self._retry_at if self._connection.phase is Phase.DOWN and self.failed is None else float("inf")
        return min(self.core.next_timer, retry)

    def no_answer(self, timeout: float) -> KvdError:
        """Why attaching did not succeed in time."""
        reason = "" if self._last_error is None else f": {self._last_error.text}"
        code = ErrorCode.DAEMON_LOST if self._last_error is None else self._last_error.code
        return Unavailable(code, f"no pool from {self._path} within {timeout} s{reason}")

    def request(self, frame: bytes, name: str = "") -> None:
        """Sends a request; `name` is that of the pull or offer that it begins.

        Raises:
            Unavailable: `OVERLOADED`, the queue to the daemon is full.

        """
        if not self._outbox and self._connection.send(frame):
            return
        if name:
            self.core.not_sent(name)
        raise Unavailable(ErrorCode.OVERLOADED, "the queue to the daemon is full; poll and try again")

    def check(self) -> None:
        """Raises the reason for which requests are of no use any more, if there is one."""
        if self.failed is not None:
            raise self.failed

    def step(self, now: float) -> None:
        """Does everything that can be done now without waiting."""
        if self._connection.phase is Phase.ATTACHED:
            ready = self._poller.poll(0)
            if self._connection.unread or ready:
                self._receive(now, session=self._watched[0] in dict(ready))
        elif self._connection.phase is Phase.ATTACHING:
            self._connection.flush()
            if self._poller.poll(0):
                self._receive_session(now)
        elif now >= self._retry_at and self.failed is None:
            self._retry(now)
        if now >= self.core.next_timer:
            self.core.on_time(now)
            if self.core.lost_notifications(now):
                self._drop(Unavailable(ErrorCode.DAEMON_LOST, "notifications are missing; attaching again"), now)
        if self.connected:
            self._send_frames(now)  # last: what the core asks because of all this waits for no other step

    def wait_readable(self, until: float) -> None:
        """Waits until there is something to do, or until `until`; for fronts without a loop."""
        if self.unread:
            return
        seconds = min(until, self.next_timer()) - time.monotonic()
        if self.unsent:
            seconds = min(seconds, FIRST_RETRY_SECONDS)
        if seconds > 0:
            self._poller.poll(min(seconds, 3600.0) * 1000)

    def detach(self) -> None:
        """Asks the daemon to take the pool back; `detached` says when it has.

        Raises:
            Unavailable: `DAEMON_LOST`, not connected.

        """
        if not self.connected:
            raise Unavailable(ErrorCode.DAEMON_LOST, "the daemon cannot be reached, and so cannot take the pool back")
        self._send_frames(math.inf)
        self._connection.detach()

    def close(self) -> None:
        """Closes the sockets and the pool; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self.connected:
            self._send_frames(math.inf)
        self._watch(())
        self._connection.close()
        if self.pool is not None:
            self.pool.close()
        self.failed = BadRequest(ErrorCode.WRONG_STATE, "the worker is closed")

    # --- inside -----------------------------------------------------------------------------------------------------

    def _send_frames(self, now: float) -> None:
        self._outbox.extend(self.core.take_frames(now))
        while self._outbox and self._connection.send(self._outbox[0]):
            self._outbox.popleft()

    def _receive(self, now: float, *, session: bool) -> None:
        """Takes frames in, and where there are no more, what the `session` has."""
        try:
            for _ in range(FRAMES_PER_STEP):
                frame = self._connection.receive()
                if frame is None:
                    if session:
                        self._receive_session(now)  # last, so that a daemon's last words are heard before its end
                    return
                self.core.on_frame(frame, now)
        except BadRequest as error:
            self._drop(error, now)

    def _receive_session(self, now: float) -> None:
        try:
            answer = self._connection.receive_session()
            if isinstance(answer, Detached):
                self.detached = True
            elif answer is not None:
                self._attached(*answer, now)
        except Unavailable as error:
            self._drop(error, now)
        except (BadRequest, InternalError) as error:
            # On the first attach this is final; later a daemon that talks nonsense may be replaced by a better one.
            if error.code is not ErrorCode.BAD_MESSAGE or self.pool is None:
                self.failed = error
            self._drop(error, now)

    def _attached(self, attached: Attached, descriptor: int, process: int, now: float) -> None:
        try:
            self._check(attached, descriptor)
        except KvdError:
            self._connection.discard(descriptor)
            self._connection.discard(process)
            raise
        if self.pool is None:
            self.pool = self._map(descriptor, attached.pool_bytes)
        else:
            self._connection.discard(descriptor)
        self._connection.attach(attached, process)
        self._watch(self._connection.filenos())
        self._attached_at, self._last_error = now, None
        self.core.on_attached(attached)

    def _check(self, attached: Attached, descriptor: int) -> None:
        """That the pool is the one that was asked for, and the one that was lent before."""
        if attached.pool_bytes != self._pool_bytes:
            text = f"asked for a pool of {self._pool_bytes} bytes, the daemon lent {attached.pool_bytes}"
            raise BadRequest(ErrorCode.BAD_POOL, text)
        if self.pool is None:
            return
        if attached.incarnation != self.core.attached.incarnation and not self._connection.daemon_exited():
            text = f"another daemon answers at {self._path}, but the process of the one before may still write"
            raise Unavailable(ErrorCode.DAEMON_LOST, text)
        if not self.pool.is_same(descriptor):
            text = "the daemon lent another pool than before, and the engine's tensors lie on that; restart the worker"
            raise BadRequest(ErrorCode.BAD_POOL, text)

    def _drop(self, error: KvdError, now: float) -> None:
        """The session is over. Connects again at once if it was a good one, else after a growing while."""
        if self._connection.phase is Phase.ATTACHED and now - self._attached_at >= STABLE_SECONDS:
            self._retry_after = 0.0
        self._last_error = error
        self._outbox.clear()
        self._watch(())
        self._connection.drop()
        self.core.on_disconnected(error)
        self._back_off(now)

    def _retry(self, now: float) -> None:
        kept = None if self.pool is None else self.pool.descriptor
        try:
            self._connection.open(self._attach, kept)
            self._watch(self._connection.filenos())
        except OSError as error:
            self._not_connected(error, now)
        if self._connection.daemon_exited():
            self.core.on_daemon_gone()

    def _not_connected(self, error: OSError, now: float) -> None:
        if self._connection.phase is not Phase.DOWN:
            self._connection.drop()
        self._last_error = Unavailable(ErrorCode.DAEMON_LOST, f"cannot connect to {self._path}: {error.strerror}")
        self._back_off(now)

    def _back_off(self, now: float) -> None:
        self._retry_at = now + self._retry_after
        self._retry_after = min(max(2 * self._retry_after, FIRST_RETRY_SECONDS), LAST_RETRY_SECONDS)

    def _watch(self, filenos: tuple[int, ...]) -> None:
        """Names the descriptors to wait on. Called with none before any of them is closed: their numbers come again."""
        if filenos == self._watched:
            return
        for fileno in self._watched:
            self._poller.unregister(fileno)
        for fileno in filenos:
            self._poller.register(fileno, select.POLLIN)
        self._watched = filenos
        self.on_descriptors(filenos)
