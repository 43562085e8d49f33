"""The two local sockets of a daemon: sessions of workers (Unix stream) and their requests (ZMTP)."""

import itertools
import os
import socket
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

from kvd import foreign, limits
from kvd.errors import BadRequest, ErrorCode, KvdError, Unavailable, refusal
from kvd.limits import LINGER_MS
from kvd.net.interface import OPEN, Intake, SessionClosed, SessionFrame, SessionOpened, WorkerEvent, WorkerFrame
from kvd.net.local.connection import Inlet, Outbox
from kvd.net.local.listener import MAX_CONNECTIONS, Listener, hang_up
from kvd.net.local.reader import UnfinishedBytes
from kvd.net.local.router_socket import RouterSocket
from kvd.net.local.session import Session, WatchedProcesses
from kvd.net.lock import PathLock
from kvd.net.stream import pack
from kvd.net.unix import MAX_PATH_BYTES, created_with, credentials, is_trusted, take_descriptors
from kvd.protocol.address import REQUESTS
from kvd.protocol.codec import encode
from kvd.protocol.worker import Refused


def _refusal(error: KvdError) -> bytes:
    return pack(encode(Refused(error.code, error.text)))


_NO_DESCRIPTORS: Final = _refusal(
    refusal(ErrorCode.OVERLOADED, "the daemon has no descriptors left for connections; raise its LimitNOFILE")
)


class WorkerSockets:
    """A `kvd.net.interface.WorkerPort` at `path` and `path` + `.zmq`, both of file mode `mode`.

    Descriptors that are sent are followed by one, `ends`, that tells a worker in any PID namespace when nothing writes
    to its pool any more: by default a pidfd of this process, as then all of its threads have ended and its descriptors
    (those of NICs, too) are closed. The ends of sessions and locks come before that.

    Raises:
        BadRequest: `BAD_CONFIG`, the path is too long for a socket.

    """

    def __init__(
        self,
        path: str,
        mode: int = 0o600,
        may_pass: Callable[[int, int], bool] = lambda _uid, _gid: True,
        ends: int | None = None,
    ) -> None:
        """`may_pass` says whether a user of these ids may attach, and so may pass a pool's descriptor."""
        if len(os.fsencode(path + REQUESTS)) > MAX_PATH_BYTES:
            raise refusal(
                ErrorCode.BAD_CONFIG,
                f"socket path {path!r} is too long: with `{REQUESTS}` at most {MAX_PATH_BYTES} bytes",
            )
        self._path = path
        self._mode = mode
        self._may_pass = may_pass
        self._requests: RouterSocket | None = None
        self._listeners: list[Listener] = []
        self._locks: dict[str, PathLock] = {}
        """By path."""
        self._given_ends = ends
        self._process = -1
        self._peers: WatchedProcesses | None = None
        self._sessions: dict[int, Session] = {}
        self._closing: set[Session] = set()
        self._unfinished: Counter[int] = Counter()
        """Bytes of sessions' unfinished frames, by user."""
        self._unfinished_requests: Counter[int] = Counter()
        self._numbers = itertools.count(1)
        self._on_event: Callable[[WorkerEvent], None]
        self._intake: Intake = OPEN

    @property
    def endpoint(self) -> str:
        """Where a worker connects its DEALER."""
        return f"ipc://{self._path}{REQUESTS}"

    def start(self, on_event: Callable[[WorkerEvent], None], intake: Intake = OPEN) -> None:
        """Binds and listens; `on_event` is called on the running loop, as often as `intake` admits it.

        Raises:
            BadRequest: `BAD_CONFIG`, another daemon serves the path, something is there, or nothing can be bound there.

        """
        self._on_event, self._intake = on_event, intake
        try:
            for path in (self._path, self._path + REQUESTS):
                self._locks[path] = PathLock(path)
        except BadRequest:
            self.close()
            raise
        self._process = os.pidfd_open(os.getpid()) if self._given_ends is None else os.dup(self._given_ends)
        self._peers = WatchedProcesses(on_event)
        self._requests = RouterSocket(
            limits.MAX_MESSAGE_BYTES, partial(Outbox, limits.MAX_UNSENT_BYTES), self._received, Inlet(intake)
        )
        try:
            with created_with(self._mode):
                self._listeners.append(Listener(self._path + REQUESTS, self._accepted_requests, intake))
                self._listeners.append(Listener(self._path, self._accepted, intake, _NO_DESCRIPTORS))
        except OSError as error:
            self.close()
            raise refusal(ErrorCode.BAD_CONFIG, f"cannot listen on {self._path}: {error}") from error

    def send_session(self, connection: int, frame: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Sends a frame, and duplicates of `descriptors`, on a session; a closed one is ignored.

        Raises:
            BadRequest: `TOO_LARGE`, the frame is above the bound; nothing was sent.

        """
        session = self._sessions.get(connection)
        if session is not None:
            session.send(frame, (*descriptors, self._process) if descriptors else ())

    def close_session(self, connection: int) -> None:
        """Hangs up on a session, after what was sent to it. No `SessionClosed` follows."""
        session = self._sessions.pop(connection, None)
        if session is not None:
            self._closing.add(session)
            session.finish(self._closing.discard)

    def forget_process(self, connection: int) -> None:
        """Stops watching the process that opened a session: no `ProcessEnded` follows."""
        if self._peers is not None:
            self._peers.forget(connection)

    def discard(self, descriptors: tuple[int, ...]) -> None:
        """Closes the descriptors of a frame that is not used."""
        foreign.close(descriptors)

    def send(self, session: bytes, frame: bytes) -> bool:
        """Sends a frame to a worker; False if its queue is full or it is not connected."""
        connection = None if self._requests is None else self._requests.by_routing_id.get(session)
        return connection is not None and connection.send(frame)

    def close(self) -> None:
        """Closes the sockets and removes their files, after at most `kvd.limits.LINGER_MS`."""
        for session in (*self._sessions.values(), *self._closing):
            session.close()
        self._sessions.clear()
        self._closing.clear()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        if self._requests is not None:
            self._requests.close(LINGER_MS / 1000)
            self._requests = None
        if self._peers is not None:
            self._peers.close()
            self._peers = None
        if self._process >= 0:
            os.close(self._process)
            self._process = -1
        while self._locks:
            path, lock = self._locks.popitem()
            lock.release(path)

    def _received(self, session: bytes, uid: int, frame: bytes) -> None:
        self._on_event(WorkerFrame(session, frame, uid))

    def _accepted_requests(self, accepted: socket.socket) -> None:
        assert self._requests is not None  # noqa: S101 - it is there while anybody listens
        _, uid, gid = credentials(accepted)
        users = [connection.uid for connection in self._requests.connections]
        # Who may not attach has no session to make requests for, and would take the places of those who do.
        if self._may_pass(uid, gid) and _has_room(uid, users) and foreign.waiting(uid) < limits.MAX_CLOSING_PER_USER:
            self._requests.accept(accepted, uid, UnfinishedBytes(uid, self._unfinished_requests))
        else:
            hang_up(accepted)

    def _accepted(self, accepted: socket.socket) -> None:
        pid, uid, gid = credentials(accepted)
        if len(self._sessions) >= MAX_CONNECTIONS:
            hang_up(accepted)
            return
        try:
            foreign.check(uid)
        except Unavailable as error:
            hang_up(accepted, _refusal(error))
            return
        passes = self._may_pass(uid, gid)
        owner = uid if not take_descriptors(accepted, take=passes) or passes else None
        connection = next(self._numbers)
        unfinished = UnfinishedBytes(uid, self._unfinished)
        self._sessions[connection] = Session(
            accepted, connection, self._session_event, self._intake, unfinished, owner=owner
        )
        watched = self._peers is not None and self._peers.watch(connection, accepted, pid)
        self._on_event(SessionOpened(connection, pid, uid, gid, watched))

    def _session_event(self, event: SessionFrame | SessionClosed) -> None:
        if isinstance(event, SessionClosed) and self._sessions.pop(event.connection, None) is None:
            return
        self._on_event(event)


def _has_room(uid: int, users: list[int]) -> bool:
    """Whether one more connection for requests is taken beside those of `users`."""
    if len(users) >= MAX_CONNECTIONS:
        return False
    others = [user for user in users if not is_trusted(user)]
    return is_trusted(uid) or (len(others) < limits.MAX_STRANGERS and others.count(uid) < limits.MAX_SESSIONS_PER_USER)
