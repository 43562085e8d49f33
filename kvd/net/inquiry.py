"""Queries a daemon for an operator's command: a connection to the session socket, without a pool."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator

from kvd.errors import ErrorCode, error_from_code, refusal
from kvd.net.stream import FrameStream
from kvd.net.unix import credentials, peer_pidfd, readable, take_descriptors
from kvd.protocol.codec import encode, session_replies
from kvd.protocol.worker import Detached, End, Refused, SessionReply, SessionRequest, Status, StatusRequest


class Inquiry:
    """A connection to the daemon at the socket `path`; closed by `close` or a `with` block.

    Raises:
        Unavailable: `DAEMON_LOST`, nobody listens there.
        BadRequest: `NOT_PERMITTED`, we may not connect.

    """

    def __init__(self, path: str) -> None:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            take_descriptors(connected, take=False)
            connected.connect(os.fsencode(path))
        except PermissionError as error:
            connected.close()
            text = f"{path}: {error.strerror}; run as the daemon's user or as a member of its group"
            raise refusal(ErrorCode.NOT_PERMITTED, text) from error
        except OSError as error:
            connected.close()
            raise refusal(ErrorCode.DAEMON_LOST, f"no daemon at {path}: {error.strerror or error}") from error
        self.credentials = credentials(connected)
        self._connected = connected
        self._path = path
        self._stream = FrameStream(connected)
        self._calls = 0

    def process(self) -> int:
        """A pidfd of the daemon's process, which the caller closes.

        Raises:
            BadRequest: `NOT_PERMITTED`, it runs in another PID namespace.
            Unavailable: `DAEMON_LOST`, it has ended.

        """
        pidfd = -1
        if self.credentials.pid:
            with self.unless_ended():
                pidfd = peer_pidfd(self._connected, self.credentials.pid, listens=True)
        if pidfd < 0:
            text = f"the daemon behind {self._path} runs in another PID namespace; run this in its container"
            raise refusal(ErrorCode.NOT_PERMITTED, text)
        return pidfd

    @contextlib.contextmanager
    def unless_ended(self) -> Iterator[None]:
        """Has ProcessLookupError mean what it means of the process that listened.

        Raises:
            Unavailable: `DAEMON_LOST`, it was raised inside.

        """
        try:
            yield
        except ProcessLookupError as error:
            text = f"the process that listened at {self._path} (pid {self.credentials.pid}) has ended; if another one "
            raise refusal(ErrorCode.DAEMON_LOST, f"{text}has the socket now, end that by its number") from error

    def status(self, timeout: float) -> bytes:
        """The daemon's status as JSON.

        Raises:
            Unavailable: `DEADLINE`, no answer within `timeout` seconds; `DAEMON_LOST`, it hung up.

        """
        self._calls += 1
        deadline = self._send(StatusRequest(self._calls), timeout)
        while True:
            for reply in self._receive(deadline):
                if isinstance(reply, Status) and reply.call == self._calls:
                    return reply.report

    def end_pool(self, name: str, timeout: float) -> None:
        """Ends a pool whose worker is gone.

        Raises:
            BadRequest: there is none of that name; `NOT_PERMITTED`, it is another user's.
            Unavailable: `POOL_BUSY`, a worker has it; `DEADLINE`, not within `timeout` seconds, it may end later;
                `DAEMON_LOST`, the daemon hung up.

        """
        deadline = self._send(End(name), timeout)
        while not any(isinstance(reply, Detached) for reply in self._receive(deadline)):
            pass

    def _send(self, request: SessionRequest, timeout: float) -> float:
        """Sends a request; returns when its answer is overdue."""
        try:
            self._stream.send(encode(request))
        except OSError as error:
            raise refusal(ErrorCode.DAEMON_LOST, f"the daemon at {self._path} hung up") from error
        return time.monotonic() + timeout

    def _receive(self, deadline: float) -> list[SessionReply]:
        waiting = max(0.0, deadline - time.monotonic())
        if not readable(self._stream.fileno(), waiting):
            raise refusal(ErrorCode.DEADLINE, f"the daemon at {self._path} did not answer in time")
        frames = self._stream.receive()
        if frames is None:
            raise refusal(ErrorCode.DAEMON_LOST, f"the daemon at {self._path} hung up")
        replies = [session_replies.decode(frame.content) for frame in frames]
        for reply in replies:
            if isinstance(reply, Refused):
                raise error_from_code(reply.code, reply.text)
        return replies

    def close(self) -> None:
        """Hangs up."""
        self._stream.close()

    def __enter__(self) -> "Inquiry":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
