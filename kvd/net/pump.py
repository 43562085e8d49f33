"""Drives a ZMQ socket from an asyncio loop, without a task or a future per message.

ZMQ's descriptor is edge-triggered: it reports once that something may have changed. So after each use of the socket the
pump has to check it again: after a wake-up it receives until nothing is left, and after a send (which takes in what
arrived meanwhile) it checks if there is something to receive.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from kvd.limits import MIB
from kvd.net.interface import OPEN, Intake
from kvd.net.options import is_readable

RECEIVES_PER_WAKE: Final = 64
"""Messages received before the loop's other work gets its turn."""

BYTES_PER_WAKE: Final = 4 * MIB
"""The same, in bytes: decoding a ticket of 11 MiB takes 50 ms, and timers waited for 64 of them."""

_NOBLOCK: Final = int(zmq.NOBLOCK)  # as ints: combining pyzmq's flags takes as long as sending
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)


class SocketPump:
    """Calls `on_message` with the parts of each message that arrives on `socket`, which it owns from now on.

    Each message waits until `intake` admits it. Of many senders (ROUTER), libzmq takes one message each in turn, so
    each gets the same share.

    If `witness` names a libzmq property such as `User-Id`, its value is appended as one more part, empty if there is
    none. It belongs to the connection; no message can forge it.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        on_message: Callable[[list[bytes]], None],
        witness: str = "",
        intake: Intake = OPEN,
    ) -> None:
        self._socket = socket
        self._on_message = on_message
        self._witness = witness
        self._routes = socket.getsockopt(zmq.TYPE) == zmq.ROUTER
        self._intake = intake
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._turn: asyncio.Handle | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._receive)
        self._look_again()

    def send(self, parts: Sequence[bytes | zmq.Frame]) -> bool:
        """Sends without blocking; False if the queue is full or (ROUTER) nobody has that routing id."""
        try:
            for part in parts[:-1]:
                self._socket.send(part, _MORE)
            self._socket.send(parts[-1], _NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        finally:
            self._look_again()
        return True

    def close(self, linger_ms: int | None = None) -> None:
        """Closes the socket after sending for at most `linger_ms` (None: the socket's own option)."""
        if self._socket.closed:
            return
        self._loop.remove_reader(self._descriptor)
        if self._turn is not None:
            self._turn.cancel()
        self._socket.close(linger_ms)

    def _receive(self) -> None:
        self._turn = None
        left = BYTES_PER_WAKE
        for _ in range(RECEIVES_PER_WAKE):
            if left <= 0:
                break
            if self._socket.closed or not is_readable(self._socket) or not self._intake.admits(self._receive):
                return
            try:
                parts = self._take()
            except zmq.Again:
                return
            left -= sum(map(len, parts))
            self._on_message(parts)
        self._schedule()

    def _take(self) -> list[bytes]:
        if not self._witness:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        # A ROUTER's first part, the sender's id, has no properties; bytes cost less than a Frame.
        parts = [self._socket.recv(zmq.NOBLOCK)] if self._routes else []
        more = True
        while more:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            parts.append(frame.bytes)
            more = frame.more
        try:
            witness = str(frame.get(self._witness))
        except zmq.ZMQError:  # old versions of ZMTP have no properties
            witness = ""
        return [*parts, witness.encode()]

    def _look_again(self) -> None:
        if self._turn is None and is_readable(self._socket):
            self._schedule()

    def _schedule(self) -> None:
        if self._turn is None:
            self._turn = self._loop.call_soon(self._receive)
