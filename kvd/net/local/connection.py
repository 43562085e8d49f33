"""One connection over a Unix socket that speaks ZMTP (`zmtp`), whoever of the two connected."""

import contextlib
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

from kvd import limits
from kvd.errors import KvdError
from kvd.limits import HANDSHAKE_MS
from kvd.net.interface import OPEN, Intake
from kvd.net.local import zmtp
from kvd.net.local.listener import hang_up
from kvd.net.local.reader import FrameReader, UnfinishedBytes
from kvd.net.stream import RECEIVE_BYTES, receive_without_descriptors
from kvd.net.unix import take_descriptors

MAX_UNSENT_PONGS: Final = 16 * limits.KIB
"""Answers to heartbeats that wait for one that does not read them; beyond it the connection ends."""

_FRAMES_PER_CALL: Final = 64
"""Frames that one call to the kernel gets: each has up to two parts, of which it takes 1,024."""

_LARGE_BYTES: Final = 4096
"""From here on a part of its own costs less than a copy."""

_OVERHEAD_BYTES: Final = 100
"""What a frame takes besides its bytes: many small ones count as what they need."""


class Outbox:
    """Frames for one reader, until the kernel has taken them whole; `put` refuses while so many bytes, or frames, wait.

    Large ones are kept, not copied: an answer for many readers takes its memory once.
    """

    def __init__(self, most_bytes: int, most_frames: int = sys.maxsize) -> None:
        self._most_bytes = most_bytes
        self._most_frames = most_frames
        self._frames: deque[tuple[bytes, ...]] = deque()
        """Each in one part, or in two: its header, and what follows."""
        self._bytes = 0
        self._sent = 0
        """Bytes of the first frame that the connection has taken."""

    def put(self, header: bytes, body: bytes = b"") -> bool:
        """Adds a frame; False if too much waits."""
        if self._bytes >= self._most_bytes or len(self._frames) >= self._most_frames:
            return False
        self._frames.append((header + body,) if len(body) < _LARGE_BYTES else (header, body))
        self._bytes += len(header) + len(body) + _OVERHEAD_BYTES
        return True

    def drop_begun(self) -> None:
        """The connection has ended, and with it a frame that it had a part of: the reader may have refused that."""
        if self._sent:
            self._drop_first()
            self._sent = 0

    def flush(self, connected: socket.socket) -> bool:
        """Sends once what the kernel takes now; True if nothing is left.

        Raises:
            OSError: the connection is gone.

        """
        if not self._frames:
            return True
        buffers: list[bytes | memoryview] = [part for frame in islice(self._frames, _FRAMES_PER_CALL) for part in frame]
        skipped = self._sent
        while skipped >= len(buffers[0]):
            skipped -= len(buffers.pop(0))
        buffers[0] = memoryview(buffers[0])[skipped:]
        try:
            self._sent += connected.sendmsg(buffers)
        except BlockingIOError:
            return False
        while self._frames and self._sent >= (size := sum(map(len, self._frames[0]))):
            self._drop_first()
            self._sent -= size
        return not self._frames

    def _drop_first(self) -> None:
        self._bytes -= sum(map(len, self._frames.popleft())) + _OVERHEAD_BYTES


class Inlet:
    """What connections share to read: `intake`, and the memory they read into and copy from at once."""

    def __init__(self, intake: Intake = OPEN) -> None:
        self.intake = intake
        self.buffer = memoryview(bytearray(RECEIVE_BYTES))


class Connection(FrameReader[zmtp.Received]):
    """Owns `connected`, at whose other end is user `uid`; sends what is in `outbox`.

    `on_welcome` is called with the connection and a routing id once the other end has done its half of the handshake,
    and sets `on_message`; `on_end` is called once the connection is closed.
    """

    def __init__(
        self,
        connected: socket.socket,
        decoder: zmtp.Decoder,
        outbox: Outbox,
        inlet: Inlet,
        *,
        uid: int,
        on_welcome: "Callable[[Connection, bytes], None]",
        on_end: "Callable[[Connection], None]",
        unfinished: UnfinishedBytes | None = None,
    ) -> None:
        super().__init__(connected.fileno(), inlet.intake)
        self.socket = connected
        self.uid = uid
        self.on_message: Callable[[bytes], None] = lambda _message: None
        """Takes each message, and an empty one for what nobody should send."""
        self._outbox = outbox
        self._on_welcome = on_welcome
        self._on_end = on_end
        self._decoder = decoder
        self._buffer = inlet.buffer
        self._unfinished = unfinished
        self._refuses = take_descriptors(connected, take=False)
        self._unsent_pongs = 0
        self._flushing = False
        """Whether the loop tells when there is room for more."""
        self._deadline = self.loop.call_later(HANDSHAKE_MS / 1000, self.close)

    def send(self, message: bytes) -> bool:
        """Sends without blocking; False if too much waits."""
        return self.send_bytes(zmtp.header(len(message)), message)

    def send_bytes(self, header: bytes, body: bytes = b"") -> bool:
        """The same of a frame as it goes out."""
        if not self._outbox.put(header, body):
            return False
        self.send_waiting()
        return True

    def send_waiting(self) -> None:
        """Sends what waits, now or as soon as there is room."""
        if not self._flushing:
            self._flush()

    def flush(self) -> bool:
        """Sends what the kernel takes now; True if nothing is left that somebody could read."""
        try:
            done = self._outbox.flush(self.socket)
        except OSError:  # the read side reports the end; what follows a part of a frame would be taken for its rest
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
            return True
        if done:
            self._unsent_pongs = 0
        return done

    def close(self) -> None:
        """Hangs up; a second call does nothing."""
        if self.socket.fileno() < 0:
            return
        self._deadline.cancel()
        self.stop()
        self.loop.remove_writer(self.socket.fileno())
        hang_up(self.socket)
        if self._unfinished is not None:
            self._unfinished.release()
        self._on_end(self)

    def receive(self) -> bool:
        """Reads once."""
        try:
            if self._refuses:
                size = self.socket.recv_into(self._buffer)
            else:
                size = receive_without_descriptors(self.socket, self._buffer, self.uid)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._decoder.add(self._buffer[:size])
        return size > 0

    def more(self) -> bool:
        """See `FrameReader`."""
        frame = self._decoder.next()
        if frame is not None:
            self.frames.append(frame)
        elif self._unfinished is not None and self._unfinished.own != self._decoder.unfinished:
            self._unfinished.set(self._decoder.unfinished)
        return frame is not None

    def deliver(self, frame: zmtp.Received) -> None:
        """Takes a frame."""
        if isinstance(frame, zmtp.Ready):
            self._deadline.cancel()
            self._on_welcome(self, frame.routing_id)
        elif isinstance(frame, bytes):
            self.on_message(frame)
        elif self._unsent_pongs < MAX_UNSENT_PONGS:
            pong = zmtp.pong(frame)
            self._unsent_pongs += len(pong)
            self.send_bytes(pong)
        else:
            self.close()

    def lost(self, error: KvdError | None) -> None:
        """Hangs up on one that is gone, or has sent what nobody should."""
        self.close()
        if error is not None:
            self.on_message(b"")

    def _flush(self) -> None:
        if self.socket.fileno() < 0:
            return
        if not self.flush():
            self._flushing = True
            self.loop.add_writer(self.socket.fileno(), self._flush)
        elif self._flushing:
            self._flushing = False
            self.loop.remove_writer(self.socket.fileno())


def flush_all(connections: Iterable[Connection], seconds: float) -> None:
    """Sends what is left, without the loop and for so long together, to those that still read."""
    end = time.monotonic() + seconds
    with selectors.PollSelector() as selector:  # which takes no descriptor
        for connection in connections:
            if not connection.flush():
                selector.register(connection.socket, selectors.EVENT_WRITE, connection)
        while selector.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.data.flush():
                    selector.unregister(key.fileobj)
