"""The sockets between daemons: one ROUTER that peers connect to, one DEALER for each peer that we connect to.

With CURVE, an address includes the daemon's public key: `tcp://host:port#<64 hexadecimal digits>`. Tickets carry all
of it, and place and key together identify a peer: a ticket with the right place and a wrong key is about another peer,
so it cannot harm tickets that name the right one.

A Unix socket, `ipc:///path.peers`, needs no key: the kernel says which user is at the other end, and both ends talk
only to daemons of their own user. With keys it is open to every user.

Each link has its own routing id, `<daemon>#<incarnation>#<token>`, so that two links to one daemon do not take over
each other's connection; others cannot either, as they would have to guess the token.
"""

import contextlib
import itertools
import os
import re
import resource
import secrets
import socket as sockets
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import zmq

from kvd import limits
from kvd.errors import BadRequest, ErrorCode, Unavailable
from kvd.net.interface import OPEN, Intake, PeerAnswered, PeerAsked, PeerEvent
from kvd.net.local.listener import hang_up
from kvd.net.lock import PathLock
from kvd.net.options import Kind, apply
from kvd.net.pump import SocketPump
from kvd.net.stream import no_descriptor
from kvd.net.trust import HandshakeMonitor, OnRejected, Reason, Rejection, Trust, ZapHandler
from kvd.net.unix import MAX_PATH_BYTES, WITNESS, created_with, credentials, take_descriptors, user_of

_ADDRESS = re.compile(
    r"(?P<place>tcp://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})|ipc://(?P<path>/[^#\s]+\.peers))"
    r"(#(?P<key>[0-9a-f]{64}))?"
)
_TCP_WITHOUT_KEYS = (
    "is reached over TCP, where nothing proves who answers; give both daemons `curve_key` and `curve_peers`, and this "
    "one `listen` at tcp://, or that and `--insecure` if everybody on the network is trusted"
)
_EVERY_HOST = ("0.0.0.0", "[::]")  # noqa: S104 - recognised, not bound
_OWN_SOCKETS = 8
"""Sockets of a context besides the links: for peers, the ZAP handler, monitors."""
DESCRIPTORS_PER_LINK = 4
"""The socket's own, its connection's, one for the peer's connection to us, and as many for everything else."""
_SHARED_BYTES = 4096
"""Longer answers (welcomes) share one copy, however many peers leave them unread."""


@dataclass(frozen=True, slots=True)
class _Link:
    """A daemon that we connected to."""

    pump: SocketPump
    key: bytes | None
    """Its public key; None without CURVE."""


class PeerSockets:
    """A `kvd.net.interface.PeerPort` over ZMQ.

    `listen` is the address to bind (`tcp://host:port`, port 0 for a free one, or `ipc:///path.peers`). `identity`
    names this daemon and its incarnation to every peer, 1 to 220 bytes. `advertise` is the address that peers use, if
    it is not the bound one.
    With `trust`, both ends of every connection prove an allowed key; `on_rejected` is told about those that do not.
    Without, a daemon at a Unix socket connects only to Unix sockets, and one at `tcp://` trusts its network.
    """

    def __init__(
        self,
        listen: str,
        identity: bytes,
        advertise: str | None = None,
        *,
        trust: Trust | None = None,
        on_rejected: OnRejected = lambda _rejection: None,
    ) -> None:
        match = _check_own(listen)
        if advertise is not None:
            _check_own(advertise)
        elif match["host"] in _EVERY_HOST:
            raise BadRequest(
                ErrorCode.BAD_CONFIG, f"{listen!r} listens on every address: say which one peers reach (`advertise`)"
            )
        self._listen = listen
        self._path: str | None = match["path"]
        self._lock: PathLock | None = None
        self._identity = identity
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
            with created_with(0o666 if self._trust else 0o600) if self._path else contextlib.nullcontext():
                socket.bind(self._listen)
        except zmq.ZMQError as error:
            self._stop_guards()
            socket.close(0)
            self.close()
            raise BadRequest(ErrorCode.BAD_CONFIG, f"cannot listen on {self._listen!r}: {error}") from error
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

        def received_by_user(parts: list[bytes]) -> None:
            if self._is_ours(user_of(parts.pop())):
                received(parts)

        if self._trust is not None:
            return SocketPump(socket, received_with_key, witness="User-Id", intake=self._intake)
        if self._path is not None:
            return SocketPump(socket, received_by_user, witness=WITNESS, intake=self._intake)
        return SocketPump(socket, received, intake=self._intake)

    def _is_ours(self, user: int) -> bool:
        """Whether a message over a Unix socket comes from our own user; reports it if not."""
        if user == os.geteuid():
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

    def connect(self, address: str) -> int:
        """Opens a link to a daemon; connects in the background and again after a loss.

        Raises:
            BadRequest: `BAD_TICKET`, the address is malformed, or has a `#key` although we do not use CURVE or none
                although we do; `NOT_PERMITTED`, its key is not on the allow-list, or without keys: it is another
                user's daemon on this host, or one reached over TCP while we listen on a Unix socket.
            Unavailable: `OVERLOADED`, no socket or no descriptor can be had for another peer.

        """
        on_event = self._on_event
        if on_event is None:
            raise RuntimeError("start the sockets before connecting")
        match = _check(address, ErrorCode.BAD_TICKET)
        key = self._server_key(match)
        by_user = self._trust is None and match["path"] is not None
        if by_user:
            _check_user(match["path"])
        socket = self._new_dealer()
        apply(socket, Kind.PEER_DEALER)
        socket.setsockopt(zmq.ROUTING_ID, self._identity + b"#" + secrets.token_hex(8).encode())
        if self._trust is not None and key is not None:
            self._trust.secure_client(socket, key)
        try:
            socket.connect(match["place"])
        except zmq.ZMQError as error:
            socket.close(0)
            raise BadRequest(ErrorCode.BAD_TICKET, f"cannot connect to {address!r}: {error}") from error
        link = next(self._numbers)

        def received(parts: list[bytes]) -> None:
            ours = not by_user or self._is_ours(user_of(parts.pop()))
            if ours and self._still_allowed(key):
                on_event(PeerAnswered(link, parts[0] if len(parts) == 1 else b""))

        pump = SocketPump(socket, received, witness=WITNESS if by_user else "", intake=self._intake)
        self._links[link] = _Link(pump, key)
        return link

    def _new_dealer(self) -> "zmq.Socket[bytes]":
        """Makes a link's socket, but leaves descriptors for sessions and metrics."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if len(self._links) >= most // DESCRIPTORS_PER_LINK:
            text = f"{len(self._links)} peers are as many as {most} open files allow; raise LimitNOFILE (ulimit -n)"
            raise Unavailable(ErrorCode.OVERLOADED, text)
        try:
            return self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise Unavailable(ErrorCode.OVERLOADED, f"no socket for another peer: {error}") from error

    def _server_key(self, match: re.Match[str]) -> bytes | None:
        """The key that the daemon at an address has to prove; None without CURVE."""
        place, text = match["place"], match["key"]
        if self._trust is None:
            if text is None:
                if match["path"] is None and self._path is not None:
                    raise BadRequest(ErrorCode.NOT_PERMITTED, f"the daemon at {place} {_TCP_WITHOUT_KEYS}")
                return None
            wrong = f"the daemon at {place} uses CURVE and this one does not; give it `curve_key` and `curve_peers`"
            raise BadRequest(ErrorCode.BAD_TICKET, wrong)
        if text is None:
            wrong = f"the daemon at {place} uses no CURVE and this one does; give it `curve_key` and `curve_peers`"
            raise BadRequest(ErrorCode.BAD_TICKET, wrong)
        key = bytes.fromhex(text)
        if self._trust.name_of(key) is None:
            wrong = f"the key {text} of the daemon at {place} is not on the allow-list; add it, then send SIGHUP"
            raise BadRequest(ErrorCode.NOT_PERMITTED, wrong)
        return key

    def _still_allowed(self, key: bytes | None) -> bool:
        return self._trust is None or (key is not None and self._trust.name_of(key) is not None)

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
        known = self._links.pop(link, None)
        if known is not None:
            known.pump.close(linger_ms=0)

    def close(self) -> None:
        """Closes everything, after at most `kvd.net.options.LINGER_MS`."""
        for link in self._links.values():
            link.pump.close()
        self._links.clear()
        self._stop_guards()
        if self._router is not None:
            self._router.close()
            self._router = None
        self._context.term()
        if self._lock is not None and self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            self._lock.release()
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


def _check_own(address: str) -> re.Match[str]:
    match = _check(address, ErrorCode.BAD_CONFIG)
    if match["key"] is not None:
        raise BadRequest(ErrorCode.BAD_CONFIG, f"{address!r}: the key is that of `curve_key`; leave it out")
    return match


def _check_user(path: str) -> None:
    """Refuses a path where another user listens; if nobody does yet, each answer is checked instead."""
    try:
        probe = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    except OSError as error:
        raise no_descriptor(error) from error
    probe.setblocking(False)
    take_descriptors(probe, take=False)
    try:
        probe.connect(path)
        user = credentials(probe).uid
    except PermissionError:
        user = -1
    except OSError:
        return
    finally:
        hang_up(probe)
    if user != os.geteuid():
        who = f"as user {user}" if user >= 0 else "as another user"
        raise BadRequest(
            ErrorCode.NOT_PERMITTED,
            f"the daemon at {path} runs {who}, this one as user {os.geteuid()}, and a Unix socket joins daemons of "
            "one user; run both as one, or give both `curve_key` and `curve_peers`",
        )


def _check(address: str, code: ErrorCode) -> re.Match[str]:
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match["port"] or 0) > 65535:
        raise BadRequest(code, f"address {address[:200]!r} is not tcp://host:port, nor ipc:///path.peers")
    path = match["path"]
    if path is not None and (os.path.normpath(path) != path or len(os.fsencode(path)) > MAX_PATH_BYTES):
        raise BadRequest(
            code, f"path {path[:200]!r} of a Unix socket is not the shortest spelling, or above {MAX_PATH_BYTES} bytes"
        )
    return match
