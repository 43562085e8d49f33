"""A worker's end of its daemon's request socket.

It speaks ZMTP itself (`kvd.net.local.zmtp`): libzmq would pass each message through a thread of its own, which on busy
cores takes longer than the daemon does. Only what the daemon leaves no room for has a thread (`Sender`).
"""

import contextlib
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from queue import SimpleQueue
from typing import Final

from kvd import limits
from kvd.errors import ErrorCode, refusal
from kvd.net.local import zmtp
from kvd.net.unix import readable

MAX_UNSENT_BYTES: Final = 4 * limits.MAX_MESSAGE_BYTES
"""Bytes that the daemon has not read; beyond it `send` refuses."""

_READ_BYTES: Final = 64 * limits.KIB


class Dealer:
    """Connects to the ROUTER at `path` under a routing id; nothing here blocks, but for what has `seconds`.

    Raises:
        OSError: nobody listens there, or no descriptor is left.

    """

    def __init__(self, path: bytes, routing_id: bytes) -> None:
        self._decoder = zmtp.Decoder(limits.MAX_MESSAGE_BYTES, of_router=True)
        self._received: deque[bytes] = deque()
        self._welcomed = False
        self._more = False
        """Whether the socket may have more than was read."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        try:
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise
        self._sender = Sender(self._socket)
        # A thread would keep the connection of one that is not closed.
        weakref.finalize(self, self._sender.end).atexit = False
        self._send(zmtp.hello(routing_id))

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._socket.fileno()

    @property
    def unread(self) -> bool:
        """Whether to `receive` before waiting: what has been read already makes nothing readable."""
        return self._more or bool(self._received)

    def is_welcomed(self, seconds: float = 0.0) -> bool:
        """Whether the ROUTER has done its half of the handshake, within so long: before, it may hang up on messages.

        Raises:
            KvdError: as `receive`.

        """
        until = time.monotonic() + seconds
        while not self._welcomed and (self._read() or readable(self.fileno(), max(0.0, until - time.monotonic()))):
            pass
        return self._welcomed

    @property
    def unsent(self) -> bool:
        """Whether what waits needs a call of `flush`, as no thread could be started."""
        return self._sender.is_stuck

    def flush(self) -> None:
        """Tries again to have a thread send what waits."""
        if self._sender.is_stuck:
            self._sender.start()

    def send(self, message: bytes) -> bool:
        """Sends as far as there is room, the rest by a thread; False if too much waits."""
        if self._sender.waiting >= MAX_UNSENT_BYTES:
            self.flush()
            return False
        self._send(zmtp.header(len(message)) + message)
        return True

    def receive(self) -> bytes | None:
        """The next message; None if none has come.

        Raises:
            Unavailable: `DAEMON_LOST`, the connection has ended.
            BadRequest: what came is no message.

        """
        while not self._received:
            if not self._read():
                return None
        return self._received.popleft()

    def close(self, seconds: float) -> None:
        """Closes; what waits gets out, for so long at most. A second call does nothing."""
        if self._socket.fileno() >= 0:
            self._sender.close(seconds)
            self._socket.close()

    def _read(self) -> bool:
        """Reads once; False if there was nothing."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            self._more = False
            return False
        except OSError:
            data = b""
        if not data:
            raise refusal(ErrorCode.DAEMON_LOST, "the daemon ended the connection for requests")
        self._more = True
        for received in self._decoder.feed(data):
            if isinstance(received, bytes):
                self._received.append(received)
            else:
                self._welcomed = True
        return True

    def _send(self, data: bytes) -> None:
        sent = 0
        if not self._sender.waiting:
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                pass
            except OSError:  # `receive` tells of the end; what follows a part of a frame would be taken for its rest
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                return
        if sent < len(data):
            self._sender.put(data[sent:])


class Sender:
    """Sends bytes over `connected` in the order in which one thread gives them, which may send itself if none wait.

    It has a thread from the first bytes on.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        """None at the end."""
        self._rest = memoryview(b"")
        """What is left of the bytes that were taken out last, for a thread that follows one which a fork has ended."""
        self._given = self._sent = 0
        """Bytes; the first is written by who gives them, the second by the thread, each alone."""
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        """Whose bytes wait."""
        self._broken = False

    @property
    def waiting(self) -> int:
        """Bytes that were given and not sent."""
        return 0 if self._broken else self._given - self._sent

    @property
    def is_stuck(self) -> bool:
        """Whether bytes wait for a thread, as none could be started: call `start` soon."""
        return self.waiting > 0 and not self._lives

    def put(self, data: bytes) -> None:
        """Sends `data` behind what waits."""
        self._given += len(data)
        self._queue.put(data)
        self.start()

    def start(self) -> None:
        """Has a thread send what waits; the first call waits until it runs."""
        if self._lives:
            return
        thread = threading.Thread(target=self._run, name="kvd-sender", daemon=True)
        with contextlib.suppress(RuntimeError):  # this user has too many
            thread.start()
            self._thread, self._process = thread, os.getpid()

    def end(self) -> None:
        """Has the thread end once all is sent."""
        self._queue.put(None)

    def close(self, seconds: float) -> None:
        """Sends what waits, for so long at most; no thread is left then. The socket is not closed."""
        if self._process != os.getpid():
            return  # we are a fork, and what waits is the parent's
        self.end()
        thread = self._thread
        if thread is None or not thread.is_alive():
            self._run(time.monotonic() + seconds)
            return
        thread.join(seconds)
        if thread.is_alive():
            self._break_off()  # which wakes it up
            thread.join()

    @property
    def _lives(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self, until: float | None = None) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        done = False
        try:
            while True:
                if not self._rest:
                    data = self._queue.get()
                    if data is None:
                        break
                    self._rest = memoryview(data)
                if not poller.poll(None if until is None else max(0.0, until - time.monotonic()) * 1000):
                    return
                self._send()
            done = True
        except OSError:  # `Dealer.receive` tells of the end
            pass
        finally:
            if not done:  # whatever follows would be taken for the rest of a frame
                self._break_off()

    def _send(self) -> None:
        with contextlib.suppress(BlockingIOError):
            sent = self._socket.send(self._rest)
            self._rest = self._rest[sent:]
            self._sent += sent

    def _break_off(self) -> None:
        self._broken = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
