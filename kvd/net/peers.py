"""The sockets between daemons: one ROUTER that peers connect to, one DEALER for each peer that we connect to.

With CURVE, an address includes the daemon's public key: `tcp://host:port#<64 hexadecimal digits>`. Tickets carry all
of it, and place and key together identify a peer: a ticket with the right place and a wrong key is about another peer,
so it cannot harm tickets that name the right one.

A Unix socket, `ipc:///path.peers`, needs no key: the kernel says which user is at the other end, and both ends talk
only to daemons of their own user. With keys it is open to every user.

Each link has its own routing id, `<daemon>#<incarnation>#<token>`, so that two links to one daemon do not take over
each other's connection; others cannot either, as they would have to guess the token.
"""

import itertools
import os
import re
import resource
import secrets
import socket as sockets
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import zmq

from kvd import limits
from kvd.errors import ErrorCode, refusal
from kvd.net.interface import OPEN, Intake, PeerAnswered, PeerAsked, PeerEvent
from kvd.net.local.gate import Gate
from kvd.net.local.relay import Passage, PrivateListener, finish
from kvd.net.lock import PathLock
from kvd.net.names import HostNames, NamedHost, Resolve, is_name, resolve
from kvd.net.options import LINGER_MS, Kind, apply
from kvd.net.places import check_address, check_own, check_user
from kvd.net.pump import SocketPump
from kvd.net.stream import no_descriptor
from kvd.net.trust import HandshakeMonitor, OnRejected, Reason, Rejection, Trust, ZapHandler
from kvd.net.unix import credentials
from kvd.protocol.address import is_everywhere

_TCP_WITHOUT_KEYS = (
    "is reached over TCP, where nothing proves who answers; give both daemons `curve_key` and `curve_peers`, and this "
    "one `listen` at tcp://, or that and `--insecure` if everybody on the network is trusted"
)
_OWN_SOCKETS = 8
"""Sockets of a context besides the links: for peers, the ZAP handler, monitors."""
_DESCRIPTORS_OVER_TCP = 4
"""The socket's own, its connection's, one for the peer's connection to us, and one for everything else."""
DESCRIPTORS_PER_LINK = 12
"""The same where both go over a Unix socket and through relays: six, three, and three for the peer's pools."""
_SHARED_BYTES = 4096
"""Longer answers (welcomes) share one copy, however many peers leave them unread."""


@dataclass(frozen=True, slots=True)
class _Link:
    """A daemon that we connected to."""

    pump: SocketPump
    key: bytes | None
    """Its public key; None without CURVE."""
    passage: Passage | None
    """None over TCP."""


class PeerSockets:
    """A `kvd.net.interface.PeerPort` over ZMQ.

    `listen` is the address to bind (`tcp://host:port`, port 0 for a free one, or `ipc:///path.peers`). `agent`
    names this daemon in this run to every peer, 1 to 220 bytes. `advertise` is the address that peers use, if
    it is not the bound one. `folder` is one where sockets can be made, that of the Unix socket unless it is given.
    With `trust`, both ends of every connection prove an allowed key; `on_rejected` is told about those that do not.
    Without, a daemon at a Unix socket connects only to Unix sockets, and one at `tcp://` trusts its network.
    """

    def __init__(
        self,
        listen: str,
        agent: bytes,
        advertise: str | None = None,
        *,
        trust: Trust | None = None,
        on_rejected: OnRejected = lambda _rejection: None,
        folder: str | None = None,
        resolve: Resolve = resolve,
    ) -> None:
        match = check_own(listen)
        if advertise is not None:
            check_own(advertise)
        elif is_everywhere(listen):
            raise refusal(
                ErrorCode.BAD_CONFIG, f"{listen!r} listens on every address: say which one peers reach (`advertise`)"
            )
        self._listen = listen
        self._path: str | None = match["path"]
        self._folder = folder or (os.path.dirname(self._path) if self._path else tempfile.gettempdir())
        self._lock: PathLock | None = None
        self._gate: Gate | None = None
        self._inner: PrivateListener | None = None
        self._agent = agent
        self._advertise = advertise
        self._trust = trust
        self._on_rejected = on_rejected
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, limits.MAX_PEERS + _OWN_SOCKETS)
        self._shared = lru_cache(maxsize=16)(_shared)
        self._zap: ZapHandler | None = None
        self._monitor: HandshakeMonitor | None = None
        self._router: SocketPump | None = None
        self._links: dict[int, _Link] = {}
        self._names = HostNames(resolve)
        self._numbers = itertools.count(1)
        self._on_event: Callable[[PeerEvent], None] | None = None
        self._intake: Intake = OPEN

    @property
    def address(self) -> str:
        """Where peers reach us, with our public key; known once started."""
        if self._advertise is None:
            raise RuntimeError("the address is known once the sockets have started")
        return f"{self._advertise}#{self._trust.pair.public.hex()}" if self._trust else self._advertise

    def start(self, on_event: Callable[[PeerEvent], None], intake: Intake = OPEN) -> None:
        """Binds; `on_event` is called on the running loop, as often as `intake` admits it.

        Raises:
            BadRequest: `BAD_CONFIG`, the address cannot be bound (in use, not ours).

        """
        if self._path is not None:
            self._lock = PathLock(self._path)
        socket = self._context.socket(zmq.ROUTER)
        apply(socket, Kind.PEER_ROUTER)
        if self._trust is not None:
            self._zap = ZapHandler(self._context, self._trust, self._on_rejected)
            self._monitor = HandshakeMonitor(socket, self._on_rejected)
            self._trust.secure_server(socket)
        self._bind(socket)
        self._on_event, self._intake = on_event, intake
        self._router = self._pump(socket, on_event)

    def _bind(self, socket: "zmq.Socket[bytes]") -> None:
        try:
            if self._path is not None:
                self._inner = PrivateListener(self._folder)
                socket.setsockopt(zmq.USE_FD, self._inner.socket.detach())
                socket.bind(f"ipc://{self._inner.path}")
                self._gate = Gate(self._path, self._inner, self._on_rejected, own_user=self._trust is None)
            else:
                socket.bind(self._listen)
        except (OSError, zmq.ZMQError) as error:
            self._stop_guards()
            socket.close(0)
            self.close()
            raise refusal(ErrorCode.BAD_CONFIG, f"cannot listen on {self._listen!r}: {error}") from error
        if self._path is not None:
            self._advertise = self._listen
        elif self._advertise is None:
            # Keep the given host: the socket would spell an IPv4 address the IPv6 way.
            port = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
            self._advertise = f"{self._listen.rpartition(':')[0]}:{port}"

    def _pump(self, socket: "zmq.Socket[bytes]", on_event: Callable[[PeerEvent], None]) -> SocketPump:
        def received(parts: list[bytes], key: str = "") -> None:
            # The first part is the sender. A message in several parts is invalid, as is the empty frame in its place.
            on_event(PeerAsked(parts[0], parts[1] if len(parts) == 2 else b"", key))

        def received_with_key(parts: list[bytes]) -> None:
            key = parts.pop().decode()
            if self._may_speak(parts[0], key):
                received(parts, key)

        if self._trust is not None:
            return SocketPump(socket, received_with_key, witness="User-Id", intake=self._intake)
        return SocketPump(socket, received, intake=self._intake)

    def _is_ours(self, connected: sockets.socket) -> bool:
        """Whether a daemon that we have connected to over a Unix socket may be a peer; reports it if not."""
        user = credentials(connected).uid
        if self._trust is not None or user == os.geteuid():
            return True
        self._on_rejected(Rejection(Reason.OTHER_USER, address=f"user {user}"))
        return False

    def _may_speak(self, sender: bytes, key: str) -> bool:
        """Whether a message's key is still allowed and belongs to the daemon it names; reports it if not."""
        assert self._trust is not None  # noqa: S101 - only called with it
        if self._trust.speaks_for(key, sender.partition(b"#")[0].decode(errors="replace")):
            return True
        known = self._trust.name_of(bytes.fromhex(key)) is not None
        self._on_rejected(Rejection(Reason.WRONG_NAME if known else Reason.UNKNOWN_KEY, key))
        return False

    def connect(self, address: str, party: str = "") -> int:
        """Opens a link to a daemon, as `PeerPort` says.

        Raises:
            BadRequest: `BAD_TICKET`, the address is malformed, or has a `#key` although we do not use CURVE or none
                although we do; `NOT_PERMITTED`, its key is not on the allow-list, or without keys: it is another
                user's daemon on this host, or one reached over TCP while we listen on a Unix socket.
            Unavailable: `OVERLOADED`, no socket or no descriptor can be had for another peer.

        """
        on_event = self._on_event
        if on_event is None:
            raise RuntimeError("start the sockets before connecting")
        match = check_address(address, ErrorCode.BAD_TICKET)
        key = self._server_key(match)
        if self._trust is None and match["path"] is not None:
            check_user(match["path"])
        socket = self._new_dealer()
        apply(socket, Kind.PEER_DEALER)
        socket.setsockopt(zmq.ROUTING_ID, self._agent + b"#" + secrets.token_hex(8).encode())
        if self._trust is not None and key is not None:
            self._trust.secure_client(socket, key)
        passage, link = None, next(self._numbers)
        try:
            if match["path"] is not None:
                passage = Passage(match["path"], self._folder, self._is_ours)
                socket.connect(passage.address)
            elif is_name(match["host"]):
                self._names.add(link, NamedHost(socket, match["host"], match["port"], party))
            else:
                socket.connect(match["place"])
        except zmq.ZMQError as error:
            socket.close(0)
            raise refusal(ErrorCode.BAD_TICKET, f"cannot connect to {address!r}: {error}") from error
        except OSError as error:
            socket.close(0)
            raise no_descriptor(error) from error

        def received(parts: list[bytes]) -> None:
            if self._still_allowed(key):
                on_event(PeerAnswered(link, parts[0] if len(parts) == 1 else b""))

        self._links[link] = _Link(SocketPump(socket, received, intake=self._intake), key, passage)
        return link

    def _new_dealer(self) -> "zmq.Socket[bytes]":
        """Makes a link's socket, but leaves descriptors for sessions and metrics."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        each = DESCRIPTORS_PER_LINK if self._path else _DESCRIPTORS_OVER_TCP
        if len(self._links) >= most // each:
            text = f"{len(self._links)} peers are as many as {most} open files allow; raise LimitNOFILE (ulimit -n)"
            raise refusal(ErrorCode.OVERLOADED, text)
        try:
            return self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise refusal(ErrorCode.OVERLOADED, f"no socket for another peer: {error}") from error

    def _server_key(self, match: re.Match[str]) -> bytes | None:
        """The key that the daemon at an address has to prove; None without CURVE."""
        place, text = match["place"], match["key"]
        if self._trust is None:
            if text is None:
                if match["path"] is None and self._path is not None:
                    raise refusal(ErrorCode.NOT_PERMITTED, f"the daemon at {place} {_TCP_WITHOUT_KEYS}")
                return None
            wrong = f"the daemon at {place} uses CURVE and this one does not; give it `curve_key` and `curve_peers`"
            raise refusal(ErrorCode.BAD_TICKET, wrong)
        if text is None:
            wrong = f"the daemon at {place} uses no CURVE and this one does; give it `curve_key` and `curve_peers`"
            raise refusal(ErrorCode.BAD_TICKET, wrong)
        key = bytes.fromhex(text)
        if self._trust.name_of(key) is None:
            wrong = f"the key {text} of the daemon at {place} is not on the allow-list; add it, then send SIGHUP"
            raise refusal(ErrorCode.NOT_PERMITTED, wrong)
        return key

    def _still_allowed(self, key: bytes | None) -> bool:
        return self._trust is None or (key is not None and self._trust.name_of(key) is not None)

    def greet(self, link: int, frame: bytes) -> None:
        """See `PeerPort`."""
        self._names.find(link, partial(self.ask, link, frame))

    def hurry(self, link: int, party: str) -> None:
        """See `PeerPort`."""
        self._names.hurry(link, party)

    def trouble(self, link: int) -> str:
        """See `PeerPort`."""
        return self._names.trouble(link)

    def ask(self, link: int, frame: bytes) -> bool:
        """Sends a frame on a link; False if its queue is full, it is closed, or its key is no longer allowed."""
        known = self._links.get(link)
        return known is not None and self._still_allowed(known.key) and known.pump.send([frame])

    def answer(self, sender: bytes, frame: bytes) -> bool:
        """Sends a frame to a daemon that connected to us; False if its queue is full or it is gone."""
        content = frame if len(frame) < _SHARED_BYTES else self._shared(frame)
        return self._router is not None and self._router.send([sender, content])

    def disconnect(self, link: int) -> None:
        """Closes a link and drops its unsent frames; ignores an unknown one."""
        self._names.remove(link)
        known = self._links.pop(link, None)
        if known is not None:
            known.pump.close(linger_ms=0)
            if known.passage is not None:
                known.passage.close()

    def close(self) -> None:
        """Closes everything, after at most `kvd.net.options.LINGER_MS`."""
        links = list(self._links.values())
        for number in self._links:
            self._names.remove(number)
        for link in links:
            link.pump.close()
        self._links.clear()
        self._stop_guards()
        if self._router is not None:
            self._router.close()
            self._router = None
        self._context.term()
        passages = [link.passage for link in links if link.passage is not None]
        finish((relay for passage in passages for relay in passage.relays), LINGER_MS / 1000)
        for passage in passages:
            passage.close()
        if self._gate is not None:
            self._gate.close(LINGER_MS / 1000)
            self._gate = None
        if self._inner is not None:
            self._inner.close()
            self._inner = None
        if self._lock is not None and self._path is not None:
            self._lock.release(self._path)
            self._lock = None

    def _stop_guards(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        if self._zap is not None:
            self._zap.close()
            self._zap = None


def _shared(frame: bytes) -> zmq.Frame:
    """A frame that libzmq sends to many peers without a copy for each."""
    return zmq.Frame(frame, copy=True)
