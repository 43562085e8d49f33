"""The daemon's end of a Unix socket that DEALERs connect to: messages by routing id, with every byte bounded."""

import socket
from collections.abc import Callable
from functools import partial

from kvd.net.local import zmtp
from kvd.net.local.connection import Connection, Inlet, Outbox, flush_all
from kvd.net.local.reader import UnfinishedBytes

OnMessage = Callable[[bytes, int, bytes], None]
"""Called with a routing id, the uid at its other end according to the kernel, and a message."""


class RouterSocket:
    """Hears the DEALERs of accepted connections, and finds them by their routing ids.

    Messages have at most `max_message_bytes`; each connection has an outbox that `make_outbox` makes.

    A connection that claims a routing id in use is hung up on before any message is taken from it. Whatever is not a
    message of one part ends the connection and is reported as an empty message.
    """

    def __init__(
        self, max_message_bytes: int, make_outbox: Callable[[], Outbox], on_message: OnMessage, inlet: Inlet
    ) -> None:
        self.by_routing_id: dict[bytes, Connection] = {}
        self.connections: dict[Connection, bytes] = {}
        """With their routing ids, which are empty until they have said one."""
        self._max_message_bytes = max_message_bytes
        self._make_outbox = make_outbox
        self._on_message = on_message
        self._inlet = inlet

    def accept(
        self,
        accepted: socket.socket,
        uid: int,
        unfinished: UnfinishedBytes | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes a user's connection over; what it leaves unfinished counts there, and its end is told."""
        connection = Connection(
            accepted,
            zmtp.Decoder(self._max_message_bytes),
            self._make_outbox(),
            self._inlet,
            uid=uid,
            on_welcome=self._welcome,
            on_end=partial(self._ended, on_end),
            unfinished=unfinished,
        )
        self.connections[connection] = b""
        connection.send_bytes(zmtp.GREETING)

    def close(self, seconds: float) -> None:
        """Closes every connection, after so long at most for those that still read what was sent."""
        flush_all(self.by_routing_id.values(), seconds)
        for connection in tuple(self.connections):
            connection.close()

    def _welcome(self, connection: Connection, routing_id: bytes) -> None:
        if self.by_routing_id.setdefault(routing_id, connection) is not connection:
            connection.close()
            return
        self.connections[connection] = routing_id
        connection.on_message = partial(self._on_message, routing_id, connection.uid)
        connection.send_bytes(zmtp.WELCOME)

    def _ended(self, on_end: Callable[[], None], connection: Connection) -> None:
        self.by_routing_id.pop(self.connections.pop(connection), None)
        on_end()
