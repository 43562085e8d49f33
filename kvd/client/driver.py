"""Moves frames between the client's core and its connection, and connects again after a loss.

Nothing here blocks, but `step` for `WELCOME_SECONDS` where it attaches. `Worker` waits with poll(2) on the descriptors,
`AsyncWorker` with its loop's readers; both call `step` when a descriptor is readable or `next_timer` is due.

A session's end alone proves nothing: the daemon may have hung up and live. Its requests end only once its process has
exited, which the pidfd that came with the pool shows even across PID namespaces. Until then pulls stay open, up to
their own deadline, and the client does not attach to another incarnation on that path. If the same incarnation answers,
nothing was lost.
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
from kvd.client.pool import Loan, Map, Pool, map_pool
from kvd.client.requests.inbox import Reading
from kvd.errors import BadRequest, ErrorCode, InternalError, KvdError, Unavailable, refusal
from kvd.protocol.worker import Attach, Attached, Detached

FIRST_RETRY_SECONDS = 0.01
LAST_RETRY_SECONDS = 0.5
"""The pause between attempts to connect again doubles from the first to the last."""

STABLE_SECONDS = 1.0
"""After a session that lasted this long, the client connects again at once."""

UNSENT_SECONDS = 0.01
"""How soon to try again what a full queue did not take, or no thread could be started for."""

WELCOME_SECONDS = 0.005
"""How long a daemon that has lent the pool is waited for on the request socket. An engine that makes few steps would
otherwise hear it a step later, and send out tickets of the last daemon until then."""

FRAMES_PER_STEP = 256
"""Frames received in one step: bounds what one `poll` costs a step of the engine."""


class Poller(Protocol):
    """The part of `select.poll` that a driver uses."""

    def poll(self, milliseconds: float, /) -> list[tuple[int, int]]:
        """The ready descriptors, each with its events."""

    def register(self, fileno: int, events: int, /) -> None:
        """Adds a descriptor."""

    def unregister(self, fileno: int, /) -> None:
        """Removes a descriptor."""


@dataclass(frozen=True, slots=True)
class Dependencies:
    """A driver's surroundings; the simulator has its own."""

    connection: Connection
    poller: Poller
    map: Map
    instance: bytes


class Driver:
    """One worker's session, its pool and its requests; see the module's docstring."""

    def __init__(
        self, path: str, name: str, spec: bytes, pool_bytes: int, dependencies: Dependencies | None = None
    ) -> None:
        dependencies = dependencies or Dependencies(Connection(path), select.poll(), map_pool, os.urandom(16))
        self.core = Core(name)
        self.failed: KvdError | None = None
        """Why the daemon no longer accepts this worker; requests raise it."""
        self.detached = self.closed = False
        self.on_descriptors: Callable[[tuple[int, ...]], None] = lambda _filenos: None
        """Called with the descriptors to wait on for reading, whenever they change."""
        self.on_request: Callable[[], None] = lambda: None
        """Called when a request was sent, as `next_timer` may come sooner, or when events may be left for others."""
        self._connection = dependencies.connection
        self._path = path
        self._attach = Attach(name, dependencies.instance, spec)
        self._loan = Loan(path, pool_bytes, dependencies.connection, dependencies.map)
        self._poller = dependencies.poller
        self._watched: tuple[int, ...] = ()
        self._outbox: deque[bytes] = deque()
        self._last_error: KvdError | None = None
        self._joining: Attached | None = None
        """What the daemon said when it lent the pool, until requests can be sent."""
        self._attached_at = 0.0
        self._reading = Reading()
        self._retry_at = 0.0
        self._retry_after = 0.0

    # --- for the clients -----------------------------------------------------------------------------------------

    @property
    def pool(self) -> Pool | None:
        """The pool that was lent."""
        return self._loan.pool

    @property
    def connected(self) -> bool:
        """Whether requests can be made."""
        return self._connection.phase is Phase.ATTACHED

    @property
    def unread(self) -> bool:
        """Whether to call `step` before waiting: data that has arrived already does not wake us up."""
        return self._connection.unread

    @property
    def unsent(self) -> bool:
        """Whether to call `step` again soon although nothing is readable."""
        return self._connection.unsent or bool(self._outbox)

    def next_timer(self) -> float:
        """When `step` has something to do although nothing is readable, on the clock of `time.monotonic`."""
        retry = self._retry_at if self._connection.phase is Phase.DOWN and self._looks_for_daemon else float("inf")
        return min(max(self.core.next_timer, self._reading.next_at), retry)

    def no_answer(self, timeout: float) -> KvdError:
        """The error for an attach that did not succeed in time."""
        reason = "" if self._last_error is None else f": {self._last_error.text}"
        code = ErrorCode.DAEMON_LOST if self._last_error is None else self._last_error.code
        what = "no pool" if self.pool is None else "a pool, but no answer to requests,"
        return refusal(code, f"{what} from {self._path} within {timeout} s{reason}")

    def request(self, frame: bytes) -> None:
        """Sends the request that the core made last.

        Raises:
            Unavailable: `OVERLOADED`, the queue to the daemon is full.

        """
        if not self._outbox and self._connection.send(frame):
            self.on_request()
            return
        self.core.not_sent()
        raise refusal(ErrorCode.OVERLOADED, "the queue to the daemon is full; poll and try again")

    def check(self) -> None:
        """Raises the reason why the daemon no longer accepts this worker, if there is one."""
        if self.failed is not None:  # a new error each time: what is raised keeps its callers' frames
            raise refusal(self.failed.code, self.failed.text)

    def step(self, now: float) -> bool:
        """Does all that can be done now without waiting. Returns whether anything came, for whoever waits."""
        came = False
        if self._connection.unsent:
            self._connection.flush()
        if self._connection.phase is Phase.ATTACHED:
            ready = self._poller.poll(0)
            if self._connection.unread or ready:
                came = self._receive(now, session=self._watched[0] in dict(ready))
        elif self._connection.phase is not Phase.DOWN:
            came = self._go_on_attaching(now)
        elif now >= self._retry_at and self._looks_for_daemon:
            self._retry(now)
        self._reading.step(now, unread=self._connection.unread)
        if (until := self._reading.until) >= self.core.next_timer:
            self.core.on_time(until)
            if self.core.lost_notifications(until):
                self._drop(refusal(ErrorCode.DAEMON_LOST, "notifications are missing; attaching again"), now)
        if self.connected:
            self._send_frames(now)  # last, so that the core's frames of this step are sent in it
        return came

    def wait_readable(self, until: float) -> None:
        """Waits until there is something to do, or until `until`; for clients without a loop."""
        if self.unread:
            return
        seconds = min(until, self.next_timer()) - time.monotonic()
        if self.unsent:
            seconds = min(seconds, UNSENT_SECONDS)
        if seconds > 0:
            self._poller.poll(min(seconds, 3600.0) * 1000)

    def end_await(self, offer: str, *, answered: bool) -> None:
        """Nobody waits for the answer to an offer any more; one without is withdrawn now."""
        self.core.events.end_await(offer)
        if not answered:
            self.core.withdraw_unanswered(offer)
        if self.closed:
            return
        if self.connected:
            self._send_frames(time.monotonic())
        self.on_request()  # events of it may be left, for others

    def detach(self) -> None:
        """Asks the daemon to take the pool back; `detached` says when it has.

        Raises:
            Unavailable: `DAEMON_LOST`, not connected.

        """
        if not self.connected:
            raise refusal(ErrorCode.DAEMON_LOST, "the daemon cannot be reached, so it cannot take the pool back")
        self._send_frames(math.inf)
        self._connection.detach()

    def close(self) -> None:
        """Closes the sockets and the pool; a second call does nothing."""
        if self.closed:
            return
        self.closed = True
        if self.connected:
            self._send_frames(math.inf)
        self._watch(())
        self._connection.close()
        if self.pool is not None:
            self.pool.close()
        self.failed = refusal(ErrorCode.WRONG_STATE, "the worker is closed")

    # --- inside -----------------------------------------------------------------------------------------------------

    @property
    def _looks_for_daemon(self) -> bool:
        """Whether it attaches again, or, if it may not, waits for the daemon's end, with which its requests end."""
        return not self.closed and (self.failed is None or self.core.has_requests)

    def _send_frames(self, now: float) -> None:
        self._outbox.extend(self.core.take_frames(now))
        while self._outbox and self._connection.send(self._outbox[0]):
            self._outbox.popleft()

    def _receive(self, now: float, *, session: bool) -> bool:
        """Receives frames, then if `session` is readable and no more are left, from that. Returns whether any came."""
        try:
            for number in range(FRAMES_PER_STEP):
                frame = self._connection.receive()
                if frame is None:
                    if session:
                        self._receive_session(now)  # last, so that the daemon's final frames come before its end
                    return session or number > 0
                self.core.on_frame(frame, now)
        except (BadRequest, Unavailable) as error:
            if session and isinstance(error, Unavailable):
                self._receive_session(now)  # it may say why
            if self.connected:
                self._drop(error, now)
        return True

    def _receive_session(self, now: float) -> None:
        try:
            answer = self._connection.receive_session()
            if isinstance(answer, Detached):
                self.detached = True
            elif answer is not None:
                self._attached(*answer)
        except Unavailable as error:
            if error.code is ErrorCode.NO_DEVICE and self.pool is None:
                self.failed = error  # it will not see the pool's GPU later either
            self._drop(error, now)
        except (BadRequest, InternalError) as error:
            # On the first attach this is final; later, a daemon that sends garbage may be replaced.
            if error.code is not ErrorCode.BAD_MESSAGE or self.pool is None:
                self.failed = error
                self.core.on_refused(error)
            self._drop(error, now)

    def _attached(self, attached: Attached, descriptor: int, process: int) -> None:
        try:
            if self._loan.take(attached, descriptor):
                self.core.on_daemon_gone()  # now, as only the one that lent the pool last is watched
            self._connection.attach(attached, process)
        except KvdError:
            self._connection.discard(process)
            raise
        self._watch(self._connection.filenos())
        self._loan.incarnation, self._joining = attached.incarnation, attached

    def _go_on_attaching(self, now: float) -> bool:
        ready = dict(self._poller.poll(0))
        if not ready and not self._connection.unread:
            return False
        attaching = self._connection.phase is Phase.ATTACHING
        if attaching:
            self._receive_session(now)
        if self._connection.phase is Phase.JOINING:
            seconds = WELCOME_SECONDS if attaching else 0.0
            self._join(now, session=not attaching and self._watched[0] in ready, seconds=seconds)
        return True

    def _join(self, now: float, *, session: bool, seconds: float) -> None:
        """Is attached if the daemon has answered on the request socket, too; `session` says whether it is readable."""
        lost = None
        try:
            if self._joining is not None and self._connection.join(seconds):
                self._attached_at, self._last_error = now, None
                self.core.on_attached(self._joining)
                self._joining = None
        except KvdError as error:
            lost = error
        if session and self._connection.phase is Phase.JOINING:
            self._receive_session(now)  # where the request connection was lost, it may say why
        if lost is not None and self._connection.phase is Phase.JOINING:
            self._drop(lost, now)

    def _drop(self, error: KvdError, now: float) -> None:
        """Ends the session, or a try. Connects again at once if it was stable, else after a growing pause."""
        if self._connection.phase is Phase.ATTACHED and now - self._attached_at >= STABLE_SECONDS:
            self._retry_after = 0.0
        self._last_error = error
        self._outbox.clear()
        self._watch(())
        self._connection.drop()
        self.core.on_disconnected(error)
        self._back_off(now)

    def _retry(self, now: float) -> None:
        if self.failed is None:
            self._connect(now)
        else:
            self._back_off(now)
        if self._connection.daemon_exited():
            self.core.on_daemon_gone()

    def _connect(self, now: float) -> None:
        kept = None if self.pool is None else self.pool.descriptor
        try:
            self._connection.open(self._attach, kept)
            self._watch(self._connection.filenos())
        except OSError as error:
            text = f"cannot connect to {self._path}: {error.strerror or error}"
            self._drop(refusal(ErrorCode.DAEMON_LOST, text), now)
        except KvdError as error:
            if error.code is ErrorCode.NOT_PERMITTED:
                self.core.on_refused(error)
            self._drop(error, now)

    def _back_off(self, now: float) -> None:
        self._retry_at = now + self._retry_after
        self._retry_after = min(max(2 * self._retry_after, FIRST_RETRY_SECONDS), LAST_RETRY_SECONDS)

    def _watch(self, filenos: tuple[int, ...]) -> None:
        """Sets the descriptors to wait on. Clear them before closing any: their numbers are used again."""
        if filenos == self._watched:
            return
        for fileno in self._watched:
            self._poller.unregister(fileno)
        for fileno in filenos:
            self._poller.register(fileno, select.POLLIN)
        self._watched = filenos
        self.on_descriptors(filenos)
