"""What a ROUTER of libzmq's is to DEALERs, on a Unix socket: messages by routing id, but bounded in every byte."""

import asyncio
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Final

from kvd import limits
from kvd.errors import KvdError
from kvd.net import zmtp
from kvd.net.inflow import Inflow
from kvd.net.interface import Intake
from kvd.net.options import HANDSHAKE_MS, LINGER_MS
from kvd.net.stream import RECEIVE_BYTES
from kvd.net.unix import credentials

MAX_CONNECTIONS: Final = 2 * limits.MAX_WORKERS
"""More are hung up on, so that idle connections cannot use up our descriptors."""

MAX_UNSENT_BYTES: Final = limits.MAX_MESSAGE_BYTES
"""Bytes that wait for one that does not read; beyond it the queue is full."""

OnMessage = Callable[[bytes, bytes, int], None]
"""Called with a routing id, a message, and the user it comes from, as the kernel says."""


class Router:
    """Messages of, and to, the DEALERs on connections that were accepted.

    A routing id in use is not taken over: who comes with it is hung up on before anything is taken from it, and
    connects again. What is no message of one part ends its connection and is handed on as an empty one.
    """

    def __init__(self, on_message: OnMessage, intake: Intake) -> None:
        self.on_message = on_message
        self.intake = intake
        self.buffer = memoryview(bytearray(RECEIVE_BYTES))
        """What every connection reads into: it is copied from at once."""
        self._connections: set[_Connection] = set()
        self._by_identity: dict[bytes, _Connection] = {}
        self._unnamed = 0

    def accept(self, accepted: socket.socket) -> None:
        """Takes a connection, where its user has room for one."""
        uid = credentials(accepted).uid
        if self._has_room(uid):
            self._connections.add(_Connection(accepted, uid, self))
        else:
            accepted.close()

    def send(self, identity: bytes, message: bytes) -> bool:
        """Sends without blocking; False where the queue is full or nobody has that routing id."""
        connection = self._by_identity.get(identity)
        return connection is not None and connection.send(message)

    def close(self) -> None:
        """Closes every connection; what waits for those that read is sent for at most the linger time."""
        end = time.monotonic() + LINGER_MS / 1000
        with selectors.DefaultSelector() as selector:
            for connection in self._by_identity.values():
                if not connection.flush():
                    selector.register(connection.fileno(), selectors.EVENT_WRITE, connection)
            while selector.get_map() and (left := end - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    if key.data.flush():
                        selector.unregister(key.fd)
        for connection in tuple(self._connections):
            connection.close()

    def name(self, identity: bytes, connection: "_Connection") -> bytes | None:
        """The routing id of a connection from here on; None where it is in use."""
        if not identity:
            self._unnamed += 1
            identity = b"\0" + self._unnamed.to_bytes(8, "big")
        return identity if self._by_identity.setdefault(identity, connection) is connection else None

    def forget(self, identity: bytes | None, connection: "_Connection") -> None:
        """A connection was closed."""
        self._connections.discard(connection)
        if identity is not None:
            del self._by_identity[identity]

    def _has_room(self, uid: int) -> bool:
        trusted = (0, os.geteuid())
        if len(self._connections) >= MAX_CONNECTIONS:
            return False
        strangers = [connection.uid for connection in self._connections if connection.uid not in trusted]
        few = strangers.count(uid) < limits.MAX_SESSIONS_PER_USER and len(strangers) < limits.MAX_STRANGERS
        return uid in trusted or few


class _Connection:
    """One DEALER."""

    def __init__(self, accepted: socket.socket, uid: int, router: Router) -> None:
        accepted.setblocking(False)
        self.uid = uid
        self._socket = accepted
        self._router = router
        self._identity: bytes | None = None
        self._decoder = zmtp.Decoder(limits.MAX_MESSAGE_BYTES)
        self._outgoing = bytearray()
        self._flushing = False
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.call_later(HANDSHAKE_MS / 1000, self.close)
        self._inflow: Inflow[zmtp.Received] = Inflow(
            accepted.fileno(), self._receive, self._deliver, self._lost, router.intake
        )
        self._queue(zmtp.GREETING)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: bytes) -> bool:
        if len(self._outgoing) >= MAX_UNSENT_BYTES:
            return False
        self._queue(zmtp.header(len(message)), message)
        return True

    def flush(self) -> bool:
        """Sends what the kernel takes now; whether that was all, or nobody is there any more."""
        try:
            sent = self._socket.send(self._outgoing)
        except BlockingIOError:
            sent = 0
        except OSError:  # reported once, by the read side
            sent = len(self._outgoing)
        del self._outgoing[:sent]
        return not self._outgoing

    def close(self) -> None:
        if self._socket.fileno() < 0:
            return
        self._deadline.cancel()
        self._inflow.stop()
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._router.forget(self._identity, self)

    def _queue(self, *parts: bytes) -> None:
        for part in parts:
            self._outgoing += part
        if not self._flushing:  # at the end of this turn: what is sent in one turn is one call to the kernel
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._socket.fileno() < 0:
            return
        if self.flush():
            self._flushing = False
            self._loop.remove_writer(self._socket.fileno())
        else:
            self._loop.add_writer(self._socket.fileno(), self._flush)

    def _receive(self) -> Iterator[zmtp.Received] | None:
        try:
            size = self._socket.recv_into(self._router.buffer)
        except BlockingIOError:
            return iter(())
        except OSError:
            return None
        return self._decoder.feed(self._router.buffer[:size]) if size else None

    def _deliver(self, received: zmtp.Received) -> None:
        if isinstance(received, bytes):
            assert self._identity is not None  # noqa: S101 - the decoder lets nothing pass before READY
            self._router.on_message(self._identity, received, self.uid)
        elif isinstance(received, zmtp.Ready):
            self._ready(received.identity)
        elif len(self._outgoing) < MAX_UNSENT_BYTES:
            self._queue(zmtp.pong(received))
        else:
            self.close()

    def _ready(self, identity: bytes) -> None:
        self._identity = self._router.name(identity, self)
        if self._identity is None:
            self.close()
            return
        self._deadline.cancel()
        self._queue(zmtp.WELCOME)

    def _lost(self, error: KvdError | None) -> None:
        identity = self._identity
        self.close()
        if error is not None and identity is not None:
            self._router.on_message(identity, b"", self.uid)
