"""Sends what a socket has no room for: an engine may do nothing else for long, and its last requests must get out."""

import contextlib
import os
import select
import socket
import threading
import time
from queue import SimpleQueue


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
