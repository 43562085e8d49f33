"""The sockets between daemons: one ROUTER that peers connect to, one DEALER for each peer that we connect to."""

import itertools
import re
from collections.abc import Callable

import zmq

from kvd.errors import BadRequest, ErrorCode
from kvd.net.interface import PeerAnswered, PeerAsked, PeerEvent
from kvd.net.options import Kind, apply
from kvd.net.pump import SocketPump

_ADDRESS = re.compile(r"tcp://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})")
_EVERY_HOST = ("0.0.0.0", "[::]")  # noqa: S104 - recognised, not bound


class PeerSockets:
    """A `kvd.net.interface.PeerPort` over ZMQ.

    `listen` is the address to bind (`tcp://host:port`, port 0 for a free one). `routing_id` names this daemon and its
    incarnation to every peer, 1 to 255 bytes. `advertise` is the address that peers use where it is not the bound one.
    """

    def __init__(self, listen: str, routing_id: bytes, advertise: str | None = None) -> None:
        match = _check(listen, ErrorCode.BAD_CONFIG)
        if advertise is not None:
            _check(advertise, ErrorCode.BAD_CONFIG)
        elif match["host"] in _EVERY_HOST:
            raise BadRequest(
                ErrorCode.BAD_CONFIG, f"{listen!r} listens on every address: say which one peers reach (`advertise`)"
            )
        self._listen = listen
        self._routing_id = routing_id
        self._advertise = advertise
        self._context = zmq.Context()
        self._router: SocketPump | None = None
        self._links: dict[int, SocketPump] = {}
        self._numbers = itertools.count(1)
        self._on_event: Callable[[PeerEvent], None] | None = None

    @property
    def address(self) -> str:
        """Where peers reach us; known once started."""
        if self._advertise is None:
            raise RuntimeError("the address is known once the sockets have started")
        return self._advertise

    def start(self, on_event: Callable[[PeerEvent], None]) -> None:
        """Binds; `on_event` is called on the running loop.

        Raises:
            BadRequest: `BAD_CONFIG`, the address cannot be bound (in use, not ours).

        """
        socket = self._context.socket(zmq.ROUTER)
        apply(socket, Kind.PEER_ROUTER)
        try:
            socket.bind(self._listen)
        except zmq.ZMQError as error:
            socket.close(0)
            raise BadRequest(ErrorCode.BAD_CONFIG, f"cannot listen on {self._listen!r}: {error}") from error
        if self._advertise is None:
            # The host as it was given: the socket would name an IPv4 address the way IPv6 does.
            port = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
            self._advertise = f"{self._listen.rpartition(':')[0]}:{port}"
        self._on_event = on_event

        def asked(parts: list[bytes]) -> None:
            # One part is the sender; a message in several parts is nobody's, and an empty frame is refused as that.
            on_event(PeerAsked(parts[0], parts[1] if len(parts) == 2 else b""))

        self._router = SocketPump(socket, asked)

    def connect(self, address: str) -> int:
        """Opens a link to a daemon; connects in the background and again after a loss.

        Raises:
            BadRequest: `BAD_TICKET`, the address is not `tcp://host:port`.

        """
        on_event = self._on_event
        if on_event is None:
            raise RuntimeError("start the sockets before connecting")
        _check(address, ErrorCode.BAD_TICKET)
        socket = self._context.socket(zmq.DEALER)
        apply(socket, Kind.PEER_DEALER)
        socket.setsockopt(zmq.ROUTING_ID, self._routing_id)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close(0)
            raise BadRequest(ErrorCode.BAD_TICKET, f"cannot connect to {address!r}: {error}") from error
        link = next(self._numbers)

        def answered(parts: list[bytes]) -> None:
            on_event(PeerAnswered(link, parts[0] if len(parts) == 1 else b""))

        self._links[link] = SocketPump(socket, answered)
        return link

    def ask(self, link: int, frame: bytes) -> bool:
        """Sends a frame on a link; False where its queue is full or it is closed."""
        pump = self._links.get(link)
        return pump is not None and pump.send([frame])

    def answer(self, sender: bytes, frame: bytes) -> bool:
        """Sends a frame to a daemon that connected to us; False where its queue is full or it is gone."""
        return self._router is not None and self._router.send([sender, frame])

    def disconnect(self, link: int) -> None:
        """Closes a link and drops what waits on it; an unknown one is ignored."""
        pump = self._links.pop(link, None)
        if pump is not None:
            pump.close(linger_ms=0)

    def close(self) -> None:
        """Closes everything, after at most the linger time of `kvd.net.options`."""
        for pump in self._links.values():
            pump.close()
        self._links.clear()
        if self._router is not None:
            self._router.close()
            self._router = None
        self._context.term()


def _check(address: str, code: ErrorCode) -> re.Match[str]:
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match["port"]) > 65535:
        raise BadRequest(code, f"address {address[:200]!r} is not tcp://host:port")
    return match
