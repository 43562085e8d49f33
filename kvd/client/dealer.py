"""A worker's end of its daemon's request socket.

It speaks ZMTP itself (`kvd.net.local.zmtp`): libzmq would pass each message through a thread of its own, which on busy
cores takes longer than the daemon does.
"""

import select
import socket
import time
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

    The first messages do not wait for the ROUTER's half of the handshake: that of a daemon takes them before it.

    Raises:
        OSError: nobody listens there, or no descriptor is left.

    """

    def __init__(self, path: str, routing_id: bytes) -> None:
        self._decoder = zmtp.Decoder(limits.MAX_MESSAGE_BYTES, of_router=True)
        self._received: deque[zmtp.Received] = deque()
        self._unsent = bytearray(zmtp.hello(routing_id))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        try:
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise
        self.flush()

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._socket.fileno()

    @property
    def unread(self) -> bool:
        """Whether frames have been read from the socket that were not received yet."""
        return bool(self._received)

    @property
    def unsent(self) -> bool:
        """Whether something waits for room: call `flush` soon."""
        return bool(self._unsent)

    def send(self, message: bytes) -> bool:
        """Sends as far as there is room, the rest by `flush`; False if too much waits."""
        if len(self._unsent) >= MAX_UNSENT_BYTES:
            return False
        self._unsent += zmtp.header(len(message))
        self._unsent += message
        self.flush()
        return True

    def flush(self) -> None:
        """Sends more of what waits; `receive` reports a loss."""
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()

    def receive(self) -> bytes | None:
        """The next message; None if none has come.

        Raises:
            Unavailable: `DAEMON_LOST`, the connection has ended.
            BadRequest: what came is no message.

        """
        while True:
            while self._received:
                received = self._received.popleft()
                if isinstance(received, bytes):
                    return received
                if isinstance(received, zmtp.Ping):
                    self._unsent += zmtp.pong(received)
                    self.flush()
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return None
            except OSError:
                data = b""
            if not data:
                raise refusal(ErrorCode.DAEMON_LOST, "the daemon ended the connection for requests")
            self._received.extend(self._decoder.feed(data))

    def close(self, seconds: float) -> None:
        """Closes; what waits gets out, for so long at most. A second call does nothing."""
        end = time.monotonic() + seconds
        poller = select.poll()
        if self._unsent:
            poller.register(self._socket, select.POLLOUT)
        while self._unsent and (left := end - time.monotonic()) > 0 and poller.poll(left * 1000):
            self.flush()
        self._unsent.clear()
        self._socket.close()
