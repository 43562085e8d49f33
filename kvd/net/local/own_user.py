"""Talks to daemons of our own user on this host over Unix sockets: the kernel says who it is, so nobody needs a key."""

import os
import socket
from collections.abc import Callable
from functools import lru_cache, partial

from kvd import limits
from kvd.net.links import LINGER_MS, SHARED_BYTES
from kvd.net.local.connection import Inlet, flush_all
from kvd.net.local.dealer_socket import DealerSocket, outbox_for_peer
from kvd.net.local.gate import Gate
from kvd.net.local.router_socket import OnMessage, RouterSocket
from kvd.net.trust import OnRejected, Reason
from kvd.net.unix import Party


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
