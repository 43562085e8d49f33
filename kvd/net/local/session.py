"""The daemon's ends of workers' sessions, and the processes behind them."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import Final

from kvd import foreign, limits
from kvd.errors import KvdError, Unavailable
from kvd.net.interface import Intake, ProcessEnded, SessionClosed, SessionFrame
from kvd.net.local.reader import FrameReader, UnfinishedBytes
from kvd.net.stream import Frame, FrameStream
from kvd.net.unix import peer_pidfd
from kvd.protocol.codec import encode
from kvd.protocol.worker import Refused

MAX_WAITING_BYTES: Final = 2 * limits.MAX_MESSAGE_BYTES
"""Bytes kept for a process that does not read its session; beyond it we hang up."""

HANG_UP_SECONDS: Final = 1.0
"""How long a session that we closed may take to read its last frame."""


class Session(FrameReader[Frame]):
    """One accepted connection, which it owns from now on."""

    def __init__(
        self,
        accepted: socket.socket,
        connection: int,
        on_event: Callable[[SessionFrame | SessionClosed], None],
        intake: Intake,
        unfinished: UnfinishedBytes,
        *,
        owner: int | None = None,
    ) -> None:
        """`owner` is the user that opened it, if it may pass descriptors."""
        super().__init__(accepted.fileno(), intake)
        self._stream = FrameStream(
            accepted, limits.MAX_SESSION_FRAME_BYTES, at_once=limits.MAX_SESSION_FRAMES, owner=owner
        )
        self._owner = owner
        self._connection = connection
        self._on_event = on_event
        self._unfinished = unfinished
        self._on_finished: Callable[[Session], None] | None = None
        self._time_out: asyncio.TimerHandle | None = None
        self._held = False
        """Frames wait until the worker has read what it was sent."""

    def send(self, frame: bytes, descriptors: tuple[int, ...]) -> None:
        """Sends a frame, and duplicates of `descriptors`; hangs up on a worker that leaves too much unread."""
        if self._stream.fileno() < 0:
            return
        try:
            self._stream.send(frame, descriptors)
        except Unavailable as error:
            self.loop.call_soon(self._fail, error)  # never inside the caller's own call
            return
        except OSError:  # the read side reports a broken connection
            return
        if self._stream.waiting > MAX_WAITING_BYTES:
            self.close()
            self.loop.call_soon(self._on_event, SessionClosed(self._connection))  # never inside the caller's own call
        elif self._stream.waiting:
            self.loop.add_writer(self._stream.fileno(), self._flush)

    def finish(self, on_finished: "Callable[[Session], None]") -> None:
        """Reads no more; closes when everything is sent, or after a while."""
        self._on_finished = on_finished
        if self._stream.waiting:
            self.stop()
            self._time_out = self.loop.call_later(HANG_UP_SECONDS, self._finished)
        else:
            self._finished()

    def close(self) -> None:
        """Closes the connection and the descriptors that came with undelivered frames."""
        if self._stream.fileno() < 0:
            return
        if self._time_out is not None:
            self._time_out.cancel()
        self.stop()
        self.loop.remove_writer(self._stream.fileno())
        self._stream.close()
        self._unfinished.release()
        while self.frames:
            foreign.close(self.frames.popleft().descriptors)

    def admits(self) -> bool:
        """Delivers nothing of a worker that does not read its answers."""
        self._held = self._stream.waiting > 0
        return not self._held and super().admits()

    def receive(self) -> bool:
        """Reads once."""
        frames = self._stream.receive()
        self.frames.extend(frames or ())
        self._unfinished.set(self._stream.unfinished)
        if self._owner is not None:
            foreign.check(self._owner)
        return frames is not None

    def deliver(self, frame: Frame) -> None:
        """Passes the frame up."""
        self._on_event(SessionFrame(self._connection, frame.content, frame.descriptors))

    def lost(self, error: KvdError | None) -> None:
        """Tells the worker what was wrong, if that is why."""
        if error is not None:
            with contextlib.suppress(OSError, Unavailable):  # what waits before it may have descriptors
                self._stream.send(encode(Refused(error.code, error.text)))
        self._finished()
        self._on_event(SessionClosed(self._connection, error))

    def _fail(self, error: KvdError) -> None:
        if self._stream.fileno() >= 0:
            self.lost(error)

    def _finished(self) -> None:
        self.close()
        if self._on_finished is not None:
            self._on_finished(self)

    def _flush(self) -> None:
        try:
            self._stream.flush()
        except Unavailable as error:
            self.lost(error)
            return
        except OSError:
            pass  # the read side reports a broken connection
        if self._stream.waiting:
            return
        self.loop.remove_writer(self._stream.fileno())
        if self._on_finished is not None:
            self._finished()
        elif self._held:
            self._held = False
            self.deliver_frames()


class WatchedProcesses:
    """The processes that opened sessions: calls `on_ended` once for each when it ends, by a pidfd."""

    def __init__(self, on_ended: Callable[[ProcessEnded], None]) -> None:
        self._on_ended = on_ended
        self._loop = asyncio.get_running_loop()
        self._pidfds: dict[int, int] = {}
        """By connection."""

    def watch(self, connection: int, connected: socket.socket, pid: int) -> bool:
        """Whether `on_ended` will be called for the process that connected; never before this has returned."""
        try:
            pidfd = peer_pidfd(connected, pid)
        except ProcessLookupError:
            self._loop.call_soon(self._on_ended, ProcessEnded(connection))
            return True
        if pidfd < 0:
            return False
        self._pidfds[connection] = pidfd
        self._loop.add_reader(pidfd, self._ended, connection)
        return True

    def forget(self, connection: int) -> None:
        """Watches the process that opened this session no more."""
        pidfd = self._pidfds.pop(connection, -1)
        if pidfd >= 0:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)

    def close(self) -> None:
        """Forgets all."""
        for connection in list(self._pidfds):
            self.forget(connection)

    def _ended(self, connection: int) -> None:
        self.forget(connection)
        self._on_ended(ProcessEnded(connection))
