"""The daemon's end of a Unix socket of a peer that it connects to."""

import asyncio
import os
import socket
from collections.abc import Callable

from kvd import limits
from kvd.errors import Unavailable
from kvd.net.links import RECONNECT_MAX_MS, RECONNECT_MS, SEND_MESSAGES
from kvd.net.local import zmtp
from kvd.net.local.connection import Connection, Inlet, Outbox
from kvd.net.local.listener import connect_to_peer, hang_up
from kvd.net.trust import OnRejected, Reason, Rejection
from kvd.net.unix import credentials


def outbox_for_peer() -> Outbox:
    """Of a link, or of a peer that has connected: for answers of some bytes, and for welcomes of megabytes."""
    return Outbox(limits.MAX_UNSENT_BYTES_PER_PEER, SEND_MESSAGES)


class DealerSocket:
    """Exchanges messages with the ROUTER that listens at `path`, if it has our own user.

    It connects again and again, after pauses that double until somebody answers; what no connection has begun to send
    waits for that. Whatever is not a message of one part ends a connection and is reported as an empty message.
    """

    def __init__(
        self, path: str, routing_id: bytes, on_message: Callable[[bytes], None], inlet: Inlet, on_rejected: OnRejected
    ) -> None:
        self.welcomed: Connection | None = None
        """The connection, once the other end has done its half of the handshake: before, it may hang up on messages."""
        self._connection: Connection | None = None
        self._on_message = on_message
        self._inlet = inlet
        self._outbox = outbox_for_peer()
        self._path = path
        self._hello = zmtp.hello(routing_id)
        self._on_rejected = on_rejected
        self._pause_ms = 0
        self._closed = False
        self._again: asyncio.TimerHandle | None = None
        self._connect()

    def send(self, message: bytes) -> bool:
        """Sends without blocking, perhaps over the next connection; False if too much waits."""
        if not self._outbox.put(zmtp.header(len(message)), message):
            return False
        if self.welcomed is not None:
            self.welcomed.send_waiting()
        return True

    def close(self) -> None:
        """Ends the connection, and drops what was not sent."""
        self._closed = True
        if self._again is not None:
            self._again.cancel()
        if self._connection is not None:
            self._connection.close()

    def _connect(self) -> None:
        try:
            connected = connect_to_peer(self._path)
        except (OSError, Unavailable):
            self._try_again()
            return
        if self._greets(connected):
            self._connection = Connection(
                connected,
                zmtp.Decoder(limits.MAX_MESSAGE_BYTES, of_router=True),
                self._outbox,
                self._inlet,
                uid=os.geteuid(),
                on_welcome=self._welcome,
                on_end=self._ended,
            )
        else:
            hang_up(connected)
            self._try_again()

    def _greets(self, connected: socket.socket) -> bool:
        user = credentials(connected).uid
        if user != os.geteuid():
            self._on_rejected(Rejection(Reason.OTHER_USER, address=f"user {user}"))
            return False
        try:
            return connected.send(self._hello) == len(self._hello)
        except OSError:  # it has hung up
            return False

    def _welcome(self, connection: Connection, _routing_id: bytes) -> None:
        self.welcomed = connection
        self._pause_ms = 0
        connection.on_message = self._on_message
        connection.send_waiting()

    def _ended(self, _connection: Connection) -> None:
        self.welcomed = self._connection = None
        self._outbox.drop_begun()
        self._try_again()

    def _try_again(self) -> None:
        if self._closed:
            return
        self._pause_ms = min(max(2 * self._pause_ms, RECONNECT_MS), RECONNECT_MAX_MS)
        self._again = asyncio.get_running_loop().call_later(self._pause_ms / 1000, self._connect)
