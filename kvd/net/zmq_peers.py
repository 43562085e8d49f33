"""Talks to peers through libzmq: over TCP, and with keys (CURVE) over Unix sockets, too."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import zmq

from kvd import limits
from kvd.errors import ErrorCode, refusal
from kvd.limits import LINGER_MS, SHARED_BYTES
from kvd.net.addresses import HostNames, NamedHost, Resolve, is_name
from kvd.net.interface import OPEN, Intake
from kvd.net.local.gate import KeyGate
from kvd.net.local.relay import Passage, PrivateListener, finish
from kvd.net.stream import no_descriptor
from kvd.net.trust import HandshakeMonitor, OnRejected, Reason, Rejection, Trust, ZapHandler
from kvd.net.zmq_socket import Kind, SocketPump, apply

OnMessage = Callable[[bytes, bytes, str], None]
"""Called with a routing id, a message, and the public key of its sender in hexadecimal digits, empty without CURVE."""

_OWN_SOCKETS = 8
"""Sockets of a context besides the links: for peers, the ZAP handler, monitors."""


@dataclass(frozen=True, slots=True)
class _Link:
    pump: SocketPump
    passage: Passage | None
    """None over TCP."""


class ZmqPeers:
    """Peers that connect to us, once we listen, and those that we connect to.

    With `trust`, both ends of a connection prove an allowed key; `on_rejected` is told about those that do not.
    `folder` is one where Unix sockets can be made.
    """

    def __init__(self, folder: str, trust: Trust | None, on_rejected: OnRejected, resolve: Resolve) -> None:
        self.intake: Intake = OPEN
        self.names = HostNames(resolve)
        self._folder = folder
        self._trust = trust
        self._on_rejected = on_rejected
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, limits.MAX_PEERS + _OWN_SOCKETS)
        self._shared = lru_cache(maxsize=16)(partial(zmq.Frame, copy=True))
        """Frames that libzmq sends to many peers without a copy for each."""
        self._zap: ZapHandler | None = None
        self._monitor: HandshakeMonitor | None = None
        self._gate: KeyGate | None = None
        self._inner: PrivateListener | None = None
        self._router: SocketPump | None = None
        self._links: dict[int, _Link] = {}

    def listen(self, place: str, path: str | None, on_message: OnMessage) -> str:
        """Accepts peers at `place` (`tcp://host:port`), or at the Unix socket `path`; returns where that is.

        Raises:
            OSError: nothing can be bound there.
            zmq.ZMQError: the same, over TCP.

        """
        socket = self._context.socket(zmq.ROUTER)
        apply(socket, Kind.PEER_ROUTER)
        if self._trust is not None:
            self._zap = ZapHandler(self._context, self._trust, self._on_rejected)
            self._monitor = HandshakeMonitor(socket, self._on_rejected)
            self._trust.secure_server(socket)
        try:
            if path is not None:
                self._inner = PrivateListener(self._folder)
                socket.setsockopt(zmq.USE_FD, self._inner.socket.detach())
                socket.bind(f"ipc://{self._inner.path}")
                self._gate = KeyGate(path, self._on_rejected, self._inner)
            else:
                socket.bind(place)
                # Keep the given host: the socket would spell an IPv4 address the IPv6 way.
                port = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
                place = f"{place.rpartition(':')[0]}:{port}"
        except (OSError, zmq.ZMQError):
            self._stop_guards()
            socket.close(0)
            raise
        self._router = self._pump(socket, on_message)
        return place

    def _pump(self, socket: "zmq.Socket[bytes]", on_message: OnMessage) -> SocketPump:
        def received(parts: list[bytes], key: str = "") -> None:
            # The first part is the sender. A message in several parts is invalid, as is the empty frame in its place.
            on_message(parts[0], parts[1] if len(parts) == 2 else b"", key)

        def received_with_key(parts: list[bytes]) -> None:
            key = parts.pop().decode()
            if self._may_speak(parts[0], key):
                received(parts, key)

        if self._trust is not None:
            return SocketPump(socket, received_with_key, witness="User-Id", intake=self.intake)
        return SocketPump(socket, received, intake=self.intake)

    def _may_speak(self, sender: bytes, key: str) -> bool:
        """Whether a message's key is still allowed and belongs to the daemon it names; reports it if not."""
        assert self._trust is not None  # noqa: S101 - only called with it
        if self._trust.speaks_for(key, sender.partition(b"#")[0].decode(errors="replace")):
            return True
        known = self._trust.name_of(bytes.fromhex(key)) is not None
        self._on_rejected(Rejection(Reason.WRONG_NAME if known else Reason.UNKNOWN_KEY, key))
        return False

    def answer(self, sender: bytes, frame: bytes) -> bool:
        """Sends without blocking to one that has connected; False if its queue is full or it is gone."""
        content = frame if len(frame) < SHARED_BYTES else self._shared(frame)
        return self._router is not None and self._router.send([sender, content])

    def connect(
        self,
        link: int,
        address: re.Match[str],
        routing_id: bytes,
        on_message: Callable[[bytes], None],
        *,
        key: bytes | None,
        party: str,
    ) -> None:
        """Talks to the daemon at `address`, now or later, which has to prove `key` if that is given.

        `party` is the worker that needs it first, in whose turn a name is looked up; empty if none does.

        Raises:
            BadRequest: `BAD_TICKET`, libzmq cannot connect to it.
            Unavailable: `OVERLOADED`, no socket or no descriptor is left.

        """
        try:
            socket = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise refusal(ErrorCode.OVERLOADED, f"no socket for another peer: {error}") from error
        apply(socket, Kind.PEER_DEALER)
        socket.setsockopt(zmq.ROUTING_ID, routing_id)
        if self._trust is not None and key is not None:
            self._trust.secure_client(socket, key)
        passage = None
        try:
            if address["path"] is not None:
                passage = Passage(address["path"], self._folder)
                socket.connect(passage.address)
            elif is_name(address["host"]):
                self.names.add(link, NamedHost(socket, address["host"], address["port"], party))
            else:
                socket.connect(address["place"])
        except zmq.ZMQError as error:
            socket.close(0)
            raise refusal(ErrorCode.BAD_TICKET, f"cannot connect to {address[0]!r}: {error}") from error
        except OSError as error:
            socket.close(0)
            raise no_descriptor(error) from error
        pump = SocketPump(socket, lambda parts: on_message(parts[0] if len(parts) == 1 else b""), intake=self.intake)
        self._links[link] = _Link(pump, passage)

    def ask(self, link: int, frame: bytes) -> bool:
        """Sends without blocking, once connected; False if the queue is full."""
        return self._links[link].pump.send([frame])

    def trouble(self, link: int) -> str:
        """Why it is not known where the name of a link leads, or nobody is connected to at its path; else empty."""
        passage = self._links[link].passage
        return self.names.trouble(link) if passage is None else passage.trouble

    def disconnect(self, link: int) -> None:
        """Drops what was not sent."""
        self.names.remove(link)
        known = self._links.pop(link)
        known.pump.close(linger_ms=0)
        if known.passage is not None:
            known.passage.close()

    def close(self) -> None:
        """Closes everything; what was sent gets out, within `LINGER_MS` for each of libzmq, our relays, and peers'."""
        for number, link in self._links.items():
            self.names.remove(number)
            link.pump.close()
        self._stop_guards()
        if self._router is not None:
            self._router.close()
            self._router = None
        self._context.term()
        passages = [link.passage for link in self._links.values() if link.passage is not None]
        finish((relay for passage in passages for relay in passage.relays), LINGER_MS / 1000)
        for passage in passages:
            passage.close()
        self._links.clear()
        if self._gate is not None:
            self._gate.close()
            self._gate = None
        if self._inner is not None:
            self._inner.close()
            self._inner = None

    def _stop_guards(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        if self._zap is not None:
            self._zap.close()
            self._zap = None
