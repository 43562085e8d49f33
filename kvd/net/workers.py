"""The two local sockets of a daemon: sessions of workers (Unix stream) and their requests (ZMQ ROUTER over ipc)."""

import asyncio
import contextlib
import itertools
import os
import socket
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

import zmq

from kvd import limits
from kvd.errors import BadRequest, ErrorCode, KvdError, Unavailable
from kvd.net.frames import Frame
from kvd.net.interface import OPEN, Intake, SessionClosed, SessionFrame, SessionOpened, WorkerEvent, WorkerFrame
from kvd.net.lock import PathLock
from kvd.net.options import BACKLOG, Kind, apply
from kvd.net.pump import SocketPump
from kvd.net.stream import FrameStream
from kvd.net.unix import MAX_PATH_BYTES, WITNESS, created_with, credentials, user_of
from kvd.protocol.codec import encode
from kvd.protocol.worker import Refused

MAX_CONNECTIONS: Final = 2 * limits.MAX_WORKERS
"""Open sessions, attached or not; more are hung up on, so that idle connections cannot use up our descriptors."""

MAX_WAITING_BYTES: Final = 2 * limits.MAX_MESSAGE_BYTES
"""Bytes kept for a process that does not read its session; beyond it we hang up."""

HANG_UP_SECONDS: Final = 1.0
"""How long a session that we closed may take to read its last frame."""

ACCEPT_PAUSE_SECONDS: Final = 0.5
"""Pause of accepting after the system had no descriptor for us."""

FRAMES_PER_TURN: Final = 4
"""Frames of one session that are handed on before others get their turn: an honest one has one."""


class WorkerSockets:
    """A `kvd.net.interface.WorkerPort` at `path`, with `path` + `.zmq` beside it, both of file mode `mode`.

    Whatever descriptors are sent, one of this process goes behind them: by its end a worker of any PID namespace knows
    that nothing writes to its pool any more. A process counts as ended when all its threads are, and its descriptors
    (those of NICs, too) are closed; the end of a session or of a lock's holder comes before that.

    Raises:
        BadRequest: `BAD_CONFIG`, the path is too long for a socket.

    """

    def __init__(self, path: str, mode: int = 0o600) -> None:
        if len(os.fsencode(self._zmq_path(path))) > MAX_PATH_BYTES:
            raise BadRequest(
                ErrorCode.BAD_CONFIG, f"socket path {path!r} is too long: with `.zmq` at most {MAX_PATH_BYTES} bytes"
            )
        self._path = path
        self._mode = mode
        self._context = zmq.Context()
        self._router: SocketPump | None = None
        self._listener: socket.socket | None = None
        self._lock: PathLock | None = None
        self._process = -1
        self._sessions: dict[int, _Session] = {}
        self._closing: set[_Session] = set()
        self._unfinished: Counter[int] = Counter()
        """Bytes of frames that have not ended, by user."""
        self._numbers = itertools.count(1)
        self._on_event: Callable[[WorkerEvent], None]
        self._intake: Intake = OPEN

    @property
    def endpoint(self) -> str:
        """Where a worker connects its ZMQ socket."""
        return f"ipc://{self._zmq_path(self._path)}"

    def start(self, on_event: Callable[[WorkerEvent], None], intake: Intake = OPEN) -> None:
        """Binds and listens; `on_event` is called on the running loop, as often as `intake` admits it.

        Raises:
            BadRequest: `BAD_CONFIG`, another daemon serves the path, or nothing can be bound there.

        """
        self._on_event, self._intake = on_event, intake
        self._lock = PathLock(self._path)
        self._process = os.pidfd_open(os.getpid())
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        router = self._context.socket(zmq.ROUTER)
        apply(router, Kind.WORKER_ROUTER)
        try:
            with created_with(self._mode):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)
                router.bind(self.endpoint)
                self._listener.bind(self._path)
            self._listener.listen(BACKLOG)
        except OSError as error:
            router.close(0)
            self.close()
            raise BadRequest(ErrorCode.BAD_CONFIG, f"cannot listen on {self._path}: {error}") from error
        self._router = SocketPump(router, self._received, witness=WITNESS, intake=intake)
        self._watch_listener()

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

    def discard(self, descriptors: tuple[int, ...]) -> None:
        """Closes descriptors that came along with a frame that nobody wants."""
        for descriptor in descriptors:
            os.close(descriptor)

    def send(self, session: bytes, frame: bytes) -> bool:
        """Sends a frame to a worker; False where its queue is full or it is not connected."""
        return self._router is not None and self._router.send([session, frame])

    def close(self) -> None:
        """Closes the sockets and removes their files, after at most the linger time of `kvd.net.options`."""
        for session in (*self._sessions.values(), *self._closing):
            session.close()
        self._sessions.clear()
        self._closing.clear()
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        if self._router is not None:
            self._router.close()
            self._router = None
        self._context.term()
        if self._process >= 0:
            os.close(self._process)
            self._process = -1
        if self._lock is not None:
            for path in (self._path, self._zmq_path(self._path)):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            self._lock.release()
            self._lock = None

    @staticmethod
    def _zmq_path(path: str) -> str:
        return f"{path}.zmq"

    def _received(self, parts: list[bytes]) -> None:
        # One part is the sender; a message in several parts is nobody's, and an empty frame is refused as that.
        uid = user_of(parts.pop())
        self._on_event(WorkerFrame(parts[0], parts[1] if len(parts) == 2 else b"", uid))

    def _watch_listener(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept_again(self) -> None:
        """Takes its turn at once: by the time that the loop tells of somebody, it is the others' again."""
        if self._listener is not None:
            self._watch_listener()
            self._accept()

    def _accept(self) -> None:
        assert self._listener is not None  # noqa: S101 - the reader is removed before the listener is
        if not self._intake.admits(self._accept_again):
            asyncio.get_running_loop().remove_reader(self._listener)
            return
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            loop.call_later(ACCEPT_PAUSE_SECONDS, self._watch_listener)
            return
        if len(self._sessions) >= MAX_CONNECTIONS:
            accepted.close()
            return
        pid, uid, gid = credentials(accepted)
        connection = next(self._numbers)
        self._sessions[connection] = _Session(
            accepted, connection, self._session_event, self._intake, _Room(uid, self._unfinished)
        )
        self._on_event(SessionOpened(connection, pid, uid, gid))

    def _session_event(self, event: SessionFrame | SessionClosed) -> None:
        if isinstance(event, SessionClosed) and self._sessions.pop(event.connection, None) is None:
            return
        self._on_event(event)


class _Room:
    """What one session takes of the room for frames that have not ended, which a user's sessions share."""

    def __init__(self, uid: int, unfinished: Counter[int]) -> None:
        self._uid = uid
        self._of_user = unfinished
        self._own = 0

    def take(self, size: int) -> None:
        """The session has `size` bytes of such a frame now.

        Raises:
            Unavailable: `OVERLOADED`, all of the user's are above the bound.

        """
        self._of_user[self._uid] += size - self._own
        self._own = size
        if self._of_user[self._uid] > limits.MAX_UNFINISHED_BYTES_PER_USER:
            text = f"frames of user {self._uid} that have not ended are above {limits.MAX_UNFINISHED_BYTES_PER_USER} B"
            raise Unavailable(ErrorCode.OVERLOADED, f"{text}; attach with fewer workers at a time")

    def leave(self) -> None:
        """The session is over."""
        self._of_user[self._uid] -= self._own
        self._own = 0
        if not self._of_user[self._uid]:
            del self._of_user[self._uid]


class _Session:
    """One connection: watched by the loop for as long as it is open."""

    def __init__(
        self,
        accepted: socket.socket,
        connection: int,
        on_event: Callable[[SessionFrame | SessionClosed], None],
        intake: Intake,
        room: _Room,
    ) -> None:
        self._stream = FrameStream(accepted, limits.MAX_SESSION_FRAME_BYTES)
        self._room = room
        self._connection = connection
        self._on_event = on_event
        self._intake = intake
        self._frames: deque[Frame] = deque()
        """That were read and not handed on: nothing more is read while there are any."""
        self._loop = asyncio.get_running_loop()
        self._on_finished: Callable[[_Session], None] | None = None
        self._time_out: asyncio.TimerHandle | None = None
        self._reading = False
        self._unread = False
        """It does not read what it is sent: until it does, nothing of it is handed on."""
        self._stopped = False
        """For that reason."""
        self._read_on()

    def send(self, frame: bytes, descriptors: tuple[int, ...]) -> None:
        if self._stream.fileno() < 0:
            return
        with contextlib.suppress(OSError):  # a broken connection is reported once, by the read side
            self._stream.send(frame, descriptors)
        if self._stream.waiting > MAX_WAITING_BYTES:
            self.close()
            self._loop.call_soon(self._on_event, SessionClosed(self._connection))  # never inside the caller's own call
        elif self._stream.waiting:
            self._unread = True
            self._loop.add_writer(self._stream.fileno(), self._flush)

    def finish(self, on_finished: "Callable[[_Session], None]") -> None:
        """Reads no more; closes when everything is sent, or after a time."""
        self._on_finished = on_finished
        if self._stream.waiting:
            self._loop.remove_reader(self._stream.fileno())
            self._time_out = self._loop.call_later(HANG_UP_SECONDS, self._finished)
        else:
            self._finished()

    def close(self) -> None:
        if self._stream.fileno() < 0:
            return
        if self._time_out is not None:
            self._time_out.cancel()
        self._loop.remove_reader(self._stream.fileno())
        self._loop.remove_writer(self._stream.fileno())
        self._stream.close()
        self._room.leave()
        while self._frames:
            for descriptor in self._frames.popleft().descriptors:
                os.close(descriptor)

    def _finished(self) -> None:
        self.close()
        if self._on_finished is not None:
            self._on_finished(self)

    def _flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()
            if self._stream.waiting:
                return
        self._loop.remove_writer(self._stream.fileno())
        self._unread = False
        if self._on_finished is not None:
            self._finished()
        elif self._stopped:
            self._stopped = False
            self._hand_on()

    def _readable(self) -> None:
        try:
            frames = self._stream.receive()
            self._frames.extend(frames or ())
            self._room.take(self._stream.unfinished)
        except KvdError as error:
            with contextlib.suppress(OSError):
                self._stream.send(encode(Refused(error.code, error.text)))
            self._lost(error)
            return
        if frames is None:
            self._lost(None)
            return
        self._hand_on()

    def _hand_on(self) -> None:
        """Hands on what was read, a few frames a turn and as they are admitted; then reads on."""
        for _ in range(FRAMES_PER_TURN):
            if self._stream.fileno() < 0 or self._on_finished is not None:
                return
            if not self._frames:
                self._read_on()
                return
            if self._unread:
                self._stopped = True
                self._pause()
                return
            if not self._intake.admits(self._hand_on):
                self._pause()
                return
            frame = self._frames.popleft()
            self._on_event(SessionFrame(self._connection, frame.content, frame.descriptors))
        self._pause()
        self._loop.call_soon(self._hand_on)

    def _read_on(self) -> None:
        if not self._reading:
            self._reading = True
            self._loop.add_reader(self._stream.fileno(), self._readable)

    def _pause(self) -> None:
        self._reading = False
        self._loop.remove_reader(self._stream.fileno())

    def _lost(self, error: KvdError | None) -> None:
        self.close()
        self._on_event(SessionClosed(self._connection, error))
