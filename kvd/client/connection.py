"""A worker's two sockets, both non-blocking: its session, and its requests once attached."""

import contextlib
import errno
import os
import socket
from enum import Enum, auto

from kvd import foreign
from kvd.client.dealer import Dealer
from kvd.errors import ErrorCode, KvdError, Unavailable, error_from_code, refusal
from kvd.limits import LINGER_MS
from kvd.net.stream import FrameStream
from kvd.net.unix import MAX_PATH_BYTES, Credentials, credentials, readable
from kvd.protocol import codec
from kvd.protocol.worker import Attach, Attached, Detach, Detached, Refused


class Phase(Enum):
    """The state of the connection."""

    DOWN = auto()
    ATTACHING = auto()
    JOINING = auto()
    """It has the pool, and no answer on the request socket yet: what is sent there now may be lost."""
    ATTACHED = auto()


class Connection:
    """Connects to the daemon at `path`; after a loss it is ready to connect again.

    Raises:
        BadRequest: `BAD_CONFIG`, the path is too long for a socket.

    """

    def __init__(self, path: str) -> None:
        if (length := len(os.fsencode(path))) > MAX_PATH_BYTES:
            text = f"the socket path {path!r} has {length} bytes; a socket's has at most {MAX_PATH_BYTES}"
            raise refusal(ErrorCode.BAD_CONFIG, text)
        self.phase = Phase.DOWN
        self._path = path
        self._stream: FrameStream | None = None
        self._dealer: Dealer | None = None
        self._daemon: int | None = None
        """It tells of the end of the processes that last lent the pool, with which it came."""
        self._connected_to: Credentials | None = None
        """Who listened where the session was opened last."""
        self._lent_by: Credentials | None = None
        """Who listened where the pool was lent last."""

    def filenos(self) -> tuple[int, ...]:
        """Descriptors to wait on for reading, the session first; they change with `phase`."""
        session = () if self._stream is None else (self._stream.fileno(),)
        return session if self._dealer is None else (*session, self._dealer.fileno())

    @property
    def unread(self) -> bool:
        """Whether to `receive` before waiting: what has been read already makes no descriptor readable."""
        return self._dealer is not None and self._dealer.unread

    @property
    def unsent(self) -> bool:
        """Whether what waits for room needs a call of `flush` soon."""
        session = self._stream is not None and self._stream.waiting > 0
        return session or (self._dealer is not None and self._dealer.unsent)

    def open(self, attach: Attach, descriptor: int | None) -> None:
        """Connects and requests the pool, with the `descriptor` of the one that was kept, if there is one.

        The descriptor can be written to by whoever gets it: nothing is sent unless a process like the one that lent
        the pool listens.

        Raises:
            OSError: nobody listens, or we may not connect.
            BadRequest: `NOT_PERMITTED`, somebody else than the pool's lender listens.
            Unavailable: `OVERLOADED`, no descriptor is left.

        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(self._path)
            self._connected_to = credentials(sock)
            self._check_lender(self._connected_to)
        except (OSError, KvdError):
            sock.close()
            raise
        self._stream = FrameStream(sock, patient=True)  # a connection that is not accepted takes no descriptor yet
        self.phase = Phase.ATTACHING
        self._stream.send(codec.encode(attach), () if descriptor is None else (descriptor,))

    def _check_lender(self, who: Credentials) -> None:
        """Refuses another user than the lender's, and a process of its PID namespace in place of one of another."""
        lender = self._lent_by
        if lender is not None and (who.uid, who.pid > 0) != (lender.uid, lender.pid > 0):
            text = f"at {self._path} listens {_describe(who)}, but the pool was lent by {_describe(lender)}: it gets "
            text += "nothing; remove what it has laid there, or if that is right start this worker again"
            raise refusal(ErrorCode.NOT_PERMITTED, text)

    def daemon_exited(self) -> bool:
        """Whether the process that last lent the pool has ended."""
        return self._daemon is not None and readable(self._daemon)

    def flush(self) -> None:
        """Sends more of what waits; `receive_session` and `receive` report a loss."""
        if self._stream is not None:
            with contextlib.suppress(OSError, Unavailable):
                self._stream.flush()
        if self._dealer is not None:
            self._dealer.flush()

    def receive_session(self) -> tuple[Attached, int, int] | Detached | None:
        """The daemon's answer on the session: the pool, its descriptor and the pidfd; or its end. None if none yet.

        Raises:
            Unavailable: `DAEMON_LOST`, the session ended; or the daemon refused.
            BadRequest: the daemon refused; `BAD_MESSAGE`, its answer is invalid.

        """
        assert self._stream is not None  # noqa: S101 - there is a stream in every phase but DOWN
        frames = self._stream.receive()
        if frames is None:
            raise refusal(ErrorCode.DAEMON_LOST, f"the daemon at {self._path} ended the session")
        if not frames:
            return None
        descriptors = [descriptor for frame in frames for descriptor in frame.descriptors]
        try:
            answer = codec.session_replies.decode(frames[0].content)
            match answer:
                case Refused(code, text):
                    raise error_from_code(code, text)
                case Attached() if len(frames) == 1 and len(descriptors) == 2 and self.phase is Phase.ATTACHING:
                    process, pool = descriptors.pop(), descriptors.pop()
                    return answer, pool, process
                case Detached() if len(frames) == 1 and self.phase is Phase.ATTACHED:
                    return answer
            raise refusal(ErrorCode.BAD_MESSAGE, f"an unexpected {type(answer).__name__}")
        finally:
            foreign.close(descriptors)

    def attach(self, attached: Attached, process: int) -> None:
        """Connects the request socket with the session id from the daemon; owns the pidfd `process` if that succeeds.

        `join` follows.

        Raises:
            BadRequest: `BAD_MESSAGE`, the endpoint is invalid.
            Unavailable: `OVERLOADED`, no descriptor is left; `DAEMON_LOST`, nobody listens there.

        """
        self._close_dealer()
        self._lent_by = self._connected_to  # before anything can fail: the pool is mapped
        scheme, _, path = attached.endpoint.encode().partition(b"://")
        if scheme != b"ipc" or not 0 < len(path) <= MAX_PATH_BYTES or b"\0" in path:
            raise refusal(ErrorCode.BAD_MESSAGE, f"the daemon's endpoint {attached.endpoint!r} is no ipc://path")
        try:
            self._dealer = Dealer(path, attached.session)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                text = f"no socket for requests: {error}; close descriptors of this process, or raise its limit"
                raise refusal(ErrorCode.OVERLOADED, f"{text} (ulimit -n)") from error
            text = f"cannot connect to {attached.endpoint}: {error.strerror or error}"
            raise refusal(ErrorCode.DAEMON_LOST, text) from error
        if self._daemon is not None:
            os.close(self._daemon)
        self._daemon = process
        self.phase = Phase.JOINING

    def join(self, seconds: float = 0.0) -> bool:
        """Whether the daemon has answered on the request socket, within so long; then requests can be sent.

        Raises:
            KvdError: as `receive`.

        """
        if self._dealer is not None and self._dealer.is_welcomed(seconds):
            self.phase = Phase.ATTACHED
        return self.phase is Phase.ATTACHED

    def detach(self) -> None:
        """Asks the daemon to take the pool back; `receive_session` returns its answer."""
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.send(codec.encode(Detach()))

    def send(self, frame: bytes) -> bool:
        """Sends a request; False if the queue is full or there is no connection."""
        return self.phase is Phase.ATTACHED and self._dealer is not None and self._dealer.send(frame)

    def receive(self) -> bytes | None:
        """The daemon's next frame; None if none has come.

        Raises:
            Unavailable: `DAEMON_LOST`, the connection has ended.
            BadRequest: what came is no frame.

        """
        return None if self._dealer is None else self._dealer.receive()

    def discard(self, descriptor: int) -> None:
        """Closes a descriptor that the daemon sent along."""
        os.close(descriptor)

    def drop(self) -> None:
        """Closes both sockets, but keeps the pidfd for `daemon_exited`."""
        self._close_dealer()
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self.phase = Phase.DOWN

    def close(self) -> None:
        """Closes everything, after at most `kvd.limits.LINGER_MS`.

        The session ends last: if its end overtook an offer, the daemon would drop the offer.
        """
        self._close_dealer(LINGER_MS / 1000)
        self.drop()
        if self._daemon is not None:
            os.close(self._daemon)
            self._daemon = None

    def _close_dealer(self, seconds: float = 0.0) -> None:
        if self._dealer is not None:
            self._dealer.close(seconds)
            self._dealer = None


def _describe(who: Credentials) -> str:
    return f"a process of user {who.uid}" + ("" if who.pid else " in another PID namespace")
