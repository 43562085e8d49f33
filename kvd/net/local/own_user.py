"""Talks to daemons of our own user on this host over Unix sockets: the kernel says who it is, so nobody needs a key."""

import asyncio
import os
import socket
from collections.abc import Callable
from functools import lru_cache, partial

from kvd import limits
from kvd.errors import BadRequest, Unavailable
from kvd.limits import LINGER_MS, RECONNECT_MAX_MS, RECONNECT_MS, SEND_MESSAGES, SHARED_BYTES
from kvd.net.local import zmtp
from kvd.net.local.connect import REFUSED_MS, connect_to_peer
from kvd.net.local.connection import Connection, Inlet, Outbox, flush_all
from kvd.net.local.gate import Gate
from kvd.net.local.listener import hang_up
from kvd.net.local.router_socket import OnMessage, RouterSocket
from kvd.net.trust import OnRejected, Reason, Rejection
from kvd.net.unix import Party, credentials


class OwnUserPeers:
    """Peers that connect to us, once we `listen`, and those that we connect to; others are told to `on_rejected`."""

    def __init__(self, on_rejected: OnRejected) -> None:
        self.inlet = Inlet()
        self._on_rejected = on_rejected
        self._gate: _OwnUserGate | None = None
        self._dealers: dict[int, DealerSocket] = {}
        """By link."""
        self._shared: Callable[[bytes], bytes] = lru_cache(maxsize=16)(lambda frame: frame)

    def listen(self, path: str, on_message: OnMessage) -> None:
        """Accepts peers at `path`.

        Raises:
            OSError: nothing can be bound there.

        """
        router = RouterSocket(limits.MAX_PEER_REQUEST_BYTES, outbox_for_peer, on_message, self.inlet)
        self._gate = _OwnUserGate(path, self._on_rejected, router)

    def answer(self, sender: bytes, frame: bytes) -> bool:
        """Sends without blocking to one that has connected; False if its queue is full or it is gone."""
        connection = None if self._gate is None else self._gate.router.by_routing_id.get(sender)
        return connection is not None and connection.send(frame if len(frame) < SHARED_BYTES else self._shared(frame))

    def connect(self, link: int, path: str, routing_id: bytes, on_message: Callable[[bytes], None]) -> None:
        """Talks to who listens at `path`, now or later."""
        self._dealers[link] = DealerSocket(path, routing_id, on_message, self.inlet, self._on_rejected)

    def ask(self, link: int, frame: bytes) -> bool:
        """Sends without blocking, once connected; False if the queue is full."""
        return self._dealers[link].send(frame)

    def trouble(self, link: int) -> str:
        """Why nobody is connected to at the path of a link; empty if somebody is, or nobody listens."""
        return self._dealers[link].trouble

    def disconnect(self, link: int) -> None:
        """Drops what was not sent."""
        self._dealers.pop(link).close()

    def close(self) -> None:
        """Closes everything; what was sent gets out, within `LINGER_MS` to peers of each kind."""
        flush_all((dealer.welcomed for dealer in self._dealers.values() if dealer.welcomed), LINGER_MS / 1000)
        for dealer in self._dealers.values():
            dealer.close()
        self._dealers.clear()
        if self._gate is not None:
            self._gate.close()
            self._gate = None


class _OwnUserGate(Gate):
    def __init__(self, path: str, on_rejected: OnRejected, router: RouterSocket) -> None:
        self.router = router
        super().__init__(path, on_rejected, 0o600)

    def close(self) -> None:
        super().close()
        self.router.close(LINGER_MS / 1000)

    def _refuses(self, who: Party) -> Reason | None:
        return super()._refuses(who) if who.uid == os.geteuid() else Reason.OTHER_USER

    def _enter(self, accepted: socket.socket, who: Party) -> None:
        self.router.accept(accepted, who.uid, on_end=partial(self._left, who))


def outbox_for_peer() -> Outbox:
    """Of a link, or of a peer that has connected: for answers of some bytes, and for welcomes of megabytes."""
    return Outbox(limits.MAX_UNSENT_BYTES_PER_PEER, SEND_MESSAGES)


class DealerSocket:
    """Exchanges messages with the ROUTER that listens at `path`, if it has our own user.

    It connects again and again, after pauses that double until a connection lasts; what no connection has begun to send
    waits for that. Whatever is not a message of one part ends a connection and is reported as an empty message.
    """

    def __init__(
        self, path: str, routing_id: bytes, on_message: Callable[[bytes], None], inlet: Inlet, on_rejected: OnRejected
    ) -> None:
        self.trouble = ""
        """Why nobody is connected to at `path`; empty if somebody is, or nobody listens."""
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
        self._welcomed_at = 0.0
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
        except (OSError, BadRequest, Unavailable) as error:
            self.trouble = "" if isinstance(error, OSError) else error.text
            self._try_again(REFUSED_MS if isinstance(error, BadRequest) else 0)
            return
        self.trouble = ""
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
            self._try_again(REFUSED_MS)

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
        self._welcomed_at = asyncio.get_running_loop().time()
        connection.on_message = self._on_message
        connection.send_waiting()

    def _ended(self, _connection: Connection) -> None:
        lasted = asyncio.get_running_loop().time() - self._welcomed_at
        if self.welcomed is not None and lasted > RECONNECT_MAX_MS / 1000:
            self._pause_ms = 0
        self.welcomed = self._connection = None
        self._outbox.drop_begun()
        self._try_again()

    def _try_again(self, least_ms: int = 0) -> None:
        if self._closed:
            return
        self._pause_ms = min(max(2 * self._pause_ms, RECONNECT_MS), RECONNECT_MAX_MS)
        pause_ms = max(self._pause_ms, least_ms)
        self._again = asyncio.get_running_loop().call_later(pause_ms / 1000, self._connect)
