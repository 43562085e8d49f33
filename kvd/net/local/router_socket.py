"""The daemon's end of a Unix socket that DEALERs connect to: messages by routing id, with every byte bounded."""

import socket
from collections.abc import Callable

from kvd.errors import KvdError
from kvd.net.local import zmtp
from kvd.net.local.connection import Connection, Inlet, Outbox, flush_all
from kvd.net.local.reader import UnfinishedBytes

OnMessage = Callable[[bytes, bytes, int], None]
"""Called with a routing id, a message, and the uid of its sender according to the kernel."""


class RouterSocket:
    """Exchanges messages with the DEALERs of accepted connections.

    Messages received have at most `max_message_bytes`; `send` refuses while `max_unsent_bytes` wait for its reader.

    A connection that claims a routing id in use is hung up on before any message is taken from it; its DEALER connects
    again. Whatever is not a message of one part ends the connection and is reported as an empty message.
    """

    def __init__(self, max_message_bytes: int, max_unsent_bytes: int, on_message: OnMessage, inlet: Inlet) -> None:
        self.max_message_bytes = max_message_bytes
        self.max_unsent_bytes = max_unsent_bytes
        self.on_message = on_message
        self.inlet = inlet
        self.connections: set[_Connection] = set()
        self.by_routing_id: dict[bytes, _Connection] = {}

    def accept(
        self,
        accepted: socket.socket,
        uid: int,
        unfinished: UnfinishedBytes | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes a user's connection over; what it leaves unfinished counts there, and its end is told."""
        self.connections.add(_Connection(accepted, uid, self, unfinished, on_end))

    def send(self, routing_id: bytes, message: bytes) -> bool:
        """Sends without blocking; False if the queue is full or nobody has that routing id."""
        connection = self.by_routing_id.get(routing_id)
        return connection is not None and connection.send(zmtp.header(len(message)), message)

    def close(self, seconds: float) -> None:
        """Closes every connection, after so long at most for those that still read what was sent."""
        flush_all(self.by_routing_id.values(), seconds)
        for connection in tuple(self.connections):
            connection.close()


class _Connection(Connection):
    """One DEALER."""

    def __init__(
        self,
        accepted: socket.socket,
        uid: int,
        owner: RouterSocket,
        unfinished: UnfinishedBytes | None,
        on_end: Callable[[], None],
    ) -> None:
        decoder = zmtp.Decoder(owner.max_message_bytes)
        outbox = Outbox(owner.max_unsent_bytes)
        super().__init__(accepted, decoder, outbox, owner.inlet, uid=uid, unfinished=unfinished)
        self._owner = owner
        self._on_end = on_end
        self._routing_id: bytes | None = None
        self.send(zmtp.GREETING)

    def welcome(self, routing_id: bytes) -> None:
        """Answers, unless another has that routing id."""
        if self._owner.by_routing_id.setdefault(routing_id, self) is not self:
            self.close()
            return
        self._routing_id = routing_id
        self.send(zmtp.WELCOME)

    def message(self, content: bytes) -> None:
        """Passes a message up."""
        assert self._routing_id is not None  # noqa: S101 - the decoder passes no message before `Ready`
        self._owner.on_message(self._routing_id, content, self.uid)

    def ended(self) -> None:
        """Its routing id is free."""
        self._owner.connections.discard(self)
        if self._routing_id is not None:
            del self._owner.by_routing_id[self._routing_id]
        self._on_end()

    def lost(self, error: KvdError | None) -> None:
        """Names it, too, if what nobody should send came with its first words."""
        routing_id = self._routing_id
        if routing_id is None and self.frames and isinstance(ready := self.frames[0], zmtp.Ready):
            routing_id = ready.routing_id if ready.routing_id not in self._owner.by_routing_id else None
        self.close()
        if error is not None and routing_id is not None:
            self._owner.on_message(routing_id, b"", self.uid)
