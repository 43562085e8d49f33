"""The daemon's end of one process of the NIXL transport."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

from kvd import foreign
from kvd.errors import KvdError, Unavailable, on_error
from kvd.net.stream import Frame, FrameStream
from kvd.net.unix import ReadWatch, readable, take_descriptors
from kvd.processes import how_ended
from kvd.transport.nixl import messages
from kvd.transport.nixl.messages import NotOpened, Opened
from kvd.transport.nixl.ucx import environment_of

_SPARE_SECONDS: Final = 1.0
"""What the process may take to end beyond the time for its slices."""

_OWNER: Final = -2
"""Whose the descriptors are that it passes, where the kernel cannot refuse them: no user's, as strangers may have it
pass them."""


class Child:
    """Starts the process, which keeps duplicates of `held` open until its end; `open` or `watch` follows.

    Raises:
        OSError: no process can be started.

    """

    def __init__(self, agent: str, held: tuple[int, ...]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [sys.executable, "-m", "kvd.transport.nixl.process", agent, str(os.getpid())]
        with theirs, on_error(ours.close):
            self._process = subprocess.Popen(  # noqa: S603 - the command is ours
                command,
                stdin=theirs.fileno(),
                pass_fds=held,
                env=environment_of(os.environ),
                process_group=0,  # Ctrl-C reaches the daemon alone; a session of its own may have its own weight
            )
        self.pid = self._process.pid
        self._socket = ours
        self._stream = FrameStream(ours, owner=None if take_descriptors(ours, take=False) else _OWNER)
        try:
            self._exit = os.pidfd_open(self.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            ours.close()
            raise
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch: ReadWatch | None = None
        self._early: list[Frame] = []
        """What came together with its first word."""
        self.fault = ""
        """Why it was ended by us; empty if it was not."""

    @property
    def taken(self) -> int:
        """Bytes of commands that the kernel has taken, since the beginning."""
        return self._stream.sent

    @property
    def told(self) -> int:
        """The same, and those that wait until it reads."""
        return self._stream.sent + self._stream.waiting

    def open(self, seconds: float) -> Opened | NotOpened | None:
        """Waits for its first word; None if it ended without one, or said none in time and is ended for that."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and readable(self._stream.fileno(), left):
            frames = self._stream.receive()
            if frames is None:
                return None
            if frames:
                first, *self._early = frames
                return messages.first_word(first.content)
        self.kill(f"it did not start within {seconds:g} s")
        return None

    def watch(self, loop: asyncio.AbstractEventLoop, hear: Callable[[], object], ended: Callable[[], None]) -> None:
        """Calls `hear` on the loop when it says something, and `ended` once no thread of it runs any more."""
        self._loop = loop
        if self._early:
            loop.call_soon(hear)  # nothing more may come
        self._watch = ReadWatch(self._stream.fileno(), hear, loop)
        self._watch.start()
        loop.add_reader(self._exit, ended)

    def receive(self) -> list[Frame] | None:
        """The frames that have come; None if it has hung up or is at fault, and then it is ended."""
        if self.fault:
            return None
        early, self._early = self._early, []
        try:
            frames = early or self._stream.receive()
        except KvdError as error:
            self.kill(f"it sent what is no message: {error.text}")
            return None
        if frames is None:
            self.kill("")
        elif any(frame.descriptors for frame in frames):
            for frame in frames:
                foreign.close(frame.descriptors)
            self.kill("it sent descriptors")
            return None
        return frames

    def send(self, command: messages.Command, descriptors: tuple[int, ...] = ()) -> None:
        """Sends a command; one that it cannot take any more is dropped, as its end will tell.

        Raises:
            Unavailable: `OVERLOADED`, none of `descriptors` can be passed now; nothing was sent.

        """
        waiting = self._stream.waiting
        try:
            self._stream.send(messages.encode(command), descriptors)
        except Unavailable as error:
            if not waiting:
                raise
            self._lost(error)
        except OSError as error:
            self._lost(error)
        self._flush_later()

    def _lost(self, error: OSError | Unavailable) -> None:
        """Commands were dropped, also earlier ones: it is ended, if it has not, so that what they began ends."""
        self.kill("" if isinstance(error, ConnectionError) else f"commands to it were lost: {error}")

    def _flush_later(self) -> None:
        if self._loop is None or self._stream.fileno() < 0:
            return
        if self._stream.waiting:
            self._loop.add_writer(self._stream.fileno(), self._flush)
        else:
            self._loop.remove_writer(self._stream.fileno())

    def _flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, Unavailable) as error:
            self._lost(error)
        self._flush_later()

    def hang_up(self) -> None:
        """After its end: what has come can be received, and nothing comes any more, not even from what it started."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def kill(self, fault: str) -> None:
        """Ends it; `ended` is called then. The first fault counts."""
        self.fault = self.fault or fault
        if self._watch is not None:
            self._watch.stop()
        self._process.kill()

    def end_within(self, seconds: float) -> None:
        """Waits for the end that it was asked for, and kills it if that takes longer. On any thread."""
        try:
            self._process.wait(seconds + _SPARE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait(self) -> str:
        """Waits until it has ended and says how; on any thread, after `kill` or `ended`."""
        how = how_ended(self._process.wait())
        return f"{self.fault} ({how})" if self.fault else how

    def close(self) -> None:
        """Gives its descriptors back, once; after `wait`."""
        if self._stream.fileno() < 0:
            return
        if self._loop is not None and self._watch is not None:
            self._watch.stop()
            self._loop.remove_reader(self._exit)
            self._loop.remove_writer(self._stream.fileno())
        self._stream.close()
        os.close(self._exit)
