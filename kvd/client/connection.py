"""The two sockets of a worker, and nothing that blocks: a session that is attached, and the requests that follow."""

import contextlib
import os
import select
import socket
from enum import Enum, auto

import zmq

from kvd.errors import BadRequest, ErrorCode, Unavailable, error_from_code
from kvd.net.options import Kind, apply, is_readable
from kvd.net.stream import FrameStream
from kvd.protocol import codec
from kvd.protocol.worker import Attach, Attached, Detach, Detached, Refused


class Phase(Enum):
    """How far the connection is."""

    DOWN = auto()
    ATTACHING = auto()
    ATTACHED = auto()


class Connection:
    """Connects to the daemon at `path`; after a loss it is ready to connect again."""

    def __init__(self, path: str) -> None:
        self.phase = Phase.DOWN
        self._path = path
        self._context = zmq.Context()
        self._stream: FrameStream | None = None
        self._dealer: zmq.Socket[bytes] | None = None
        self._daemon: int | None = None
        """A descriptor of the process that last lent the pool, which came with it."""
        self._unread = False
        """ZMQ's descriptor tells of a change once: whether there may be something that it has told of already."""

    def filenos(self) -> tuple[int, ...]:
        """What to wait on for reading, the session first; another set after every change of `phase`."""
        session = () if self._stream is None else (self._stream.fileno(),)
        return session if self._dealer is None else (*session, int(self._dealer.getsockopt(zmq.FD)))

    @property
    def unread(self) -> bool:
        """Whether to `receive` before waiting: the descriptors would not wake up for what is there already."""
        return self._unread

    @property
    def unsent(self) -> bool:
        """Whether a part of the session's last frame waits for room: call `flush` soon."""
        return self._stream is not None and self._stream.waiting > 0

    def open(self, attach: Attach, descriptor: int | None) -> None:
        """Connects and asks for the pool, with the `descriptor` of the one that was kept, if there is one.

        Raises:
            OSError: nobody listens, or not for us.

        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(self._path)
        except OSError:
            sock.close()
            raise
        self._stream = FrameStream(sock)
        self.phase = Phase.ATTACHING
        self._stream.send(codec.encode(attach), () if descriptor is None else (descriptor,))

    def daemon_exited(self) -> bool:
        """Whether the process that last lent the pool is no more."""
        if self._daemon is None:
            return False
        poller = select.poll()
        poller.register(self._daemon, select.POLLIN)
        return bool(poller.poll(0))

    def flush(self) -> None:
        """Sends the rest of the session's last frame, as far as there is room; a loss shows in `receive_session`."""
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.flush()

    def receive_session(self) -> tuple[Attached, int, int] | Detached | None:
        """The daemon's answer on the session: the pool, with its descriptor and the process's; or the pool's end.

        None where there is none yet.

        Raises:
            Unavailable: `DAEMON_LOST`, the session ended; or what the daemon refused with.
            BadRequest: what the daemon refused with; `BAD_MESSAGE`, its answer makes no sense.

        """
        assert self._stream is not None  # noqa: S101 - there is a stream in every phase but DOWN
        frames = self._stream.receive()
        if frames is None:
            raise Unavailable(ErrorCode.DAEMON_LOST, f"the daemon at {self._path} ended the session")
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
                case Detached() if len(frames) == 1:
                    return answer
            raise BadRequest(ErrorCode.BAD_MESSAGE, f"a {type(answer).__name__} that nothing was asked for by")
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def attach(self, attached: Attached, process: int) -> None:
        """Connects the requests' socket as the session that the daemon gave us; `process` is ours from here on.

        Raises:
            BadRequest: `BAD_MESSAGE`, the endpoint is none.

        """
        if self._daemon is not None:
            os.close(self._daemon)
        self._daemon = process
        self._close_dealer()
        self._dealer = self._context.socket(zmq.DEALER)
        apply(self._dealer, Kind.WORKER_DEALER)
        try:
            self._dealer.setsockopt(zmq.ROUTING_ID, attached.session)
            self._dealer.connect(attached.endpoint)
        except zmq.ZMQError as error:
            raise BadRequest(ErrorCode.BAD_MESSAGE, f"the daemon's endpoint {attached.endpoint!r}: {error}") from error
        self.phase = Phase.ATTACHED
        self._unread = True

    def detach(self) -> None:
        """Asks the daemon to take the pool back; `receive_session` has the answer."""
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.send(codec.encode(Detach()))

    def send(self, frame: bytes) -> bool:
        """Sends a request; False where the queue is full or there is no connection."""
        if self._dealer is None:
            return False
        self._unread = True
        try:
            self._dealer.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> bytes | None:
        """The next frame of the daemon; None where there is none. One in several parts comes as an empty one."""
        if self._dealer is None:
            return None
        self._unread = is_readable(self._dealer)
        if not self._unread:
            return None
        parts = self._dealer.recv_multipart(zmq.NOBLOCK)
        return parts[0] if len(parts) == 1 else b""

    def discard(self, descriptor: int) -> None:
        """Closes a descriptor that the daemon sent along."""
        os.close(descriptor)

    def drop(self) -> None:
        """Closes both sockets; what the daemon's process does can still be asked for."""
        self._close_dealer()
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self.phase = Phase.DOWN

    def close(self) -> None:
        """Closes everything, after at most the linger time of `kvd.net.options`.

        The session ends last: an offer that its end overtook would be one of a worker that is gone, and be dropped.
        """
        if self._dealer is not None:
            self._dealer.close()
            self._dealer = None
        self._context.term()
        self.drop()
        if self._daemon is not None:
            os.close(self._daemon)
            self._daemon = None

    def _close_dealer(self) -> None:
        if self._dealer is not None:
            self._dealer.close(0)
            self._dealer = None
        self._unread = False
