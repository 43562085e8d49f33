"""A worker's end of its daemon's request socket.

It speaks ZMTP itself (`kvd.net.local.zmtp`): libzmq would pass each message through a thread of its own, which on busy
cores takes longer than the daemon does. A thread has only what the daemon leaves no room for: an engine may have
nothing else to do for long, and its last requests must get out.
"""

import contextlib
import select
import socket
import threading
from collections import deque
from typing import Final

from kvd import limits
from kvd.errors import ErrorCode, refusal
from kvd.net.local import zmtp

MAX_UNSENT_BYTES: Final = 4 * limits.MAX_MESSAGE_BYTES
"""Bytes that the daemon has not read; beyond it `send` refuses."""

_READ_BYTES: Final = 64 * limits.KIB


class Dealer:
    """Connects to the ROUTER at `path` under a routing id; nothing here blocks, but for `close`.

    Raises:
        OSError: nobody listens there, or no descriptor is left.

    """

    def __init__(self, path: bytes, routing_id: bytes) -> None:
        self._decoder = zmtp.Decoder(limits.MAX_MESSAGE_BYTES, of_router=True)
        self._received: deque[bytes] = deque()
        self._welcomed = False
        self._more = False
        """Whether the socket may have more than was read."""
        self._lock = threading.Lock()
        """Held by whoever sends."""
        self._unsent = bytearray(zmtp.hello(routing_id))
        self._sender: threading.Thread | None = None
        """Sends what there was no room for."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        try:
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise
        self._flush()

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._socket.fileno()

    @property
    def unread(self) -> bool:
        """Whether to `receive` before waiting: what has been read already makes nothing readable."""
        return self._more or bool(self._received)

    def is_welcomed(self) -> bool:
        """Whether the ROUTER has done its half of the handshake: before, it may hang up on what was sent.

        Raises:
            KvdError: as `receive`.

        """
        if not self._welcomed:
            self._read()
        return self._welcomed

    def send(self, message: bytes) -> bool:
        """Sends as far as there is room, the rest by a thread; False if too much waits."""
        with self._lock:
            if len(self._unsent) >= MAX_UNSENT_BYTES:
                return False
            self._unsent += zmtp.header(len(message))
            self._unsent += message
            self._flush()
            if self._unsent and self._sender is None:
                self._sender = threading.Thread(target=self._send_rest, name="kvd-sender", daemon=True)
                try:
                    self._sender.start()
                except RuntimeError:  # no thread can be started: what follows sends it
                    self._sender = None
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
        sender = self._sender
        if sender is not None:
            sender.join(seconds)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes it up
            sender.join()
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
            elif isinstance(received, zmtp.Ping):
                raise refusal(ErrorCode.BAD_MESSAGE, "a heartbeat, of which a daemon sends none")
            else:
                self._welcomed = True
        return True

    def _flush(self) -> None:
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # `receive` tells of the end; what follows a part of a frame would be taken for its rest
            self._unsent.clear()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _send_rest(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        while True:
            poller.poll()
            with self._lock:
                self._flush()
                if not self._unsent:
                    self._sender = None
                    return
