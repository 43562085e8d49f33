"""The daemon's end of the workers' request socket: messages by routing id, with every byte bounded (`zmtp`)."""

import contextlib
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from kvd import foreign, limits
from kvd.errors import KvdError
from kvd.net.interface import Intake
from kvd.net.local import zmtp
from kvd.net.local.listener import MAX_CONNECTIONS, hang_up
from kvd.net.local.reader import FrameReader, UnfinishedBytes
from kvd.net.options import HANDSHAKE_MS, LINGER_MS
from kvd.net.stream import RECEIVE_BYTES, receive_without_descriptors
from kvd.net.unix import credentials, is_trusted, take_descriptors

MAX_UNSENT_BYTES: Final = limits.MAX_MESSAGE_BYTES
"""Bytes waiting for a worker that does not read; beyond it `send` refuses."""

MAX_UNSENT_PONGS: Final = 16 * limits.KIB
"""Answers to heartbeats that wait for one that does not read them; beyond it the connection ends."""

OnMessage = Callable[[bytes, bytes, int], None]
"""Called with a routing id, a message, and the uid of its sender according to the kernel."""


class RequestSocket:
    """Exchanges messages with the DEALERs of accepted connections.

    A connection that claims a routing id in use is hung up on before any message is taken from it. Whatever is not a
    message of one part ends the connection and is reported as an empty message.
    """

    def __init__(self, on_message: OnMessage, intake: Intake) -> None:
        self.on_message = on_message
        self.intake = intake
        self.buffer = memoryview(bytearray(RECEIVE_BYTES))
        """Every connection reads into it and copies at once."""
        self.connections: set[_Connection] = set()
        self.by_routing_id: dict[bytes, _Connection] = {}
        self.unfinished: Counter[int] = Counter()
        """Bytes of unfinished frames, by user."""

    def accept(self, accepted: socket.socket) -> None:
        """Takes a connection over, or closes it if it or its user would have too many."""
        uid = credentials(accepted).uid
        if self._has_room(uid) and foreign.waiting(uid) < limits.MAX_CLOSING_PER_USER:
            self.connections.add(_Connection(accepted, uid, self))
        else:
            hang_up(accepted)

    def send(self, routing_id: bytes, message: bytes) -> bool:
        """Sends without blocking; False if the queue is full or nobody has that routing id."""
        connection = self.by_routing_id.get(routing_id)
        return connection is not None and connection.send(message)

    def close(self) -> None:
        """Closes every connection, after at most `LINGER_MS` for those that still read what was sent."""
        end = time.monotonic() + LINGER_MS / 1000
        with selectors.DefaultSelector() as selector:
            for connection in self.by_routing_id.values():
                if not connection.flush():
                    selector.register(connection.socket, selectors.EVENT_WRITE, connection)
            while selector.get_map() and (left := end - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    if key.data.flush():
                        selector.unregister(key.fileobj)
        for connection in tuple(self.connections):
            connection.close()

    def _has_room(self, uid: int) -> bool:
        if len(self.connections) >= MAX_CONNECTIONS:
            return False
        others = [connection.uid for connection in self.connections if not is_trusted(connection.uid)]
        return is_trusted(uid) or (
            len(others) < limits.MAX_STRANGERS and others.count(uid) < limits.MAX_SESSIONS_PER_USER
        )


class _Connection(FrameReader[zmtp.Received]):
    """One DEALER."""

    def __init__(self, accepted: socket.socket, uid: int, owner: RequestSocket) -> None:
        super().__init__(accepted.fileno(), owner.intake)
        self.socket = accepted
        self.uid = uid
        self._refuses = take_descriptors(accepted, take=False)
        self._owner = owner
        self._routing_id: bytes | None = None
        self._decoder = zmtp.Decoder(limits.MAX_MESSAGE_BYTES)
        self._unfinished = UnfinishedBytes(uid, owner.unfinished)
        self._unsent = bytearray()
        self._unsent_pongs = 0
        self._flushing = False
        """Whether the loop tells when there is room for more."""
        self._deadline = self.loop.call_later(HANDSHAKE_MS / 1000, self.close)
        self._queue(zmtp.GREETING)

    def send(self, message: bytes) -> bool:
        if len(self._unsent) >= MAX_UNSENT_BYTES:
            return False
        self._queue(zmtp.header(len(message)), message)
        return True

    def flush(self) -> bool:
        """Sends what the kernel takes now; True if nothing is left that somebody could read."""
        try:
            sent = self.socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:  # the read side reports the end; what follows a part of a frame would be taken for its rest
            sent = len(self._unsent)
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
        del self._unsent[:sent]
        if not self._unsent:
            self._unsent_pongs = 0
        return not self._unsent

    def close(self) -> None:
        if self.socket.fileno() < 0:
            return
        self._deadline.cancel()
        self.stop()
        self.loop.remove_writer(self.socket.fileno())
        hang_up(self.socket)
        self._unfinished.release()
        self._owner.connections.discard(self)
        if self._routing_id is not None:
            del self._owner.by_routing_id[self._routing_id]

    def receive(self) -> bool:
        try:
            if self._refuses:
                size = self.socket.recv_into(self._owner.buffer)
            else:
                size = receive_without_descriptors(self.socket, self._owner.buffer, self.uid)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.frames.extend(self._decoder.feed(self._owner.buffer[:size]))
        self._unfinished.set(self._decoder.unfinished)
        return size > 0

    def deliver(self, frame: zmtp.Received) -> None:
        if isinstance(frame, zmtp.Ready):
            self._welcome(frame.routing_id)
        elif isinstance(frame, bytes):
            assert self._routing_id is not None  # noqa: S101 - the decoder passes no message before `Ready`
            self._owner.on_message(self._routing_id, frame, self.uid)
        elif self._unsent_pongs < MAX_UNSENT_PONGS:
            pong = zmtp.pong(frame)
            self._unsent_pongs += len(pong)
            self._queue(pong)
        else:
            self.close()

    def lost(self, error: KvdError | None) -> None:
        routing_id = self._routing_id
        if routing_id is None and self.frames and isinstance(ready := self.frames[0], zmtp.Ready):
            routing_id = ready.routing_id if ready.routing_id not in self._owner.by_routing_id else None
        self.close()
        if error is not None and routing_id is not None:
            self._owner.on_message(routing_id, b"", self.uid)

    def _welcome(self, routing_id: bytes) -> None:
        if self._owner.by_routing_id.setdefault(routing_id, self) is not self:
            self.close()
            return
        self._routing_id = routing_id
        self._deadline.cancel()
        self._queue(zmtp.WELCOME)

    def _queue(self, *parts: bytes) -> None:
        for part in parts:
            self._unsent += part
        if not self._flushing:
            self._flush()

    def _flush(self) -> None:
        if self.socket.fileno() < 0:
            return
        if not self.flush():
            self._flushing = True
            self.loop.add_writer(self.socket.fileno(), self._flush)
        elif self._flushing:
            self._flushing = False
            self.loop.remove_writer(self.socket.fileno())
