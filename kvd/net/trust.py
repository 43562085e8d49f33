"""Who may talk to a daemon: CURVE on both ends of every socket between daemons, and our own ZAP handler.

A connection stands only if the other end has the secret of a key on our allow-list, whichever end connected. That is
asked once, at the connection; because a key may leave the list while its connection stands, and because one allowed
daemon must not speak for another, every message that arrives is asked for its key again (`Trust.speaks_for`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import zmq

from kvd.net.keys import KEY_BYTES, Allowed, KeyPair, covers
from kvd.net.pump import SocketPump

ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
ZAP_DOMAIN: Final = b"kvd.peers"
_ZAP_VERSION: Final = b"1.0"


class Reason(StrEnum):
    """Why somebody was not let in: a label of a metric, so there are few."""

    UNKNOWN_KEY = "unknown_key"
    """has a key that is not on the allow-list"""
    WRONG_NAME = "wrong_name"
    """is allowed, and speaks in another daemon's name"""
    OTHER_USER = "other_user"
    """runs as another user, and came over a Unix socket"""
    NO_HANDSHAKE = "no_handshake"
    """came as far as no key: speaks NULL or PLAIN security, took us for another daemon, or sent garbage"""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Somebody was not let in."""

    reason: Reason
    key: str = ""
    """In hexadecimal, where the other end has shown one."""
    address: str = ""
    """Where it came from, where libzmq says so: an IP address, or a user."""


OnRejected = Callable[[Rejection], None]


class Trust:
    """Our own key, and the daemons that are allowed, by public key. We always allow ourselves, and all our pools."""

    def __init__(self, pair: KeyPair, name: str, allowed: Mapping[bytes, Allowed]) -> None:
        self.pair = pair
        self._own = name
        self.replace(allowed)

    def replace(self, allowed: Mapping[bytes, Allowed]) -> None:
        """Another allow-list holds from now on, for connections that stand as well."""
        own = allowed[self.pair.public].name if self.pair.public in allowed else self._own
        self._allowed = {**allowed, self.pair.public: Allowed(own if covers(own, self._own) else self._own)}
        self._exact = {known.name: key for key, known in self._allowed.items() if not known.name.endswith("*")}
        patterns = [(known.name[:-1], key) for key, known in self._allowed.items() if known.name.endswith("*")]
        self._patterns = sorted(patterns, key=lambda pattern: -len(pattern[0]))

    def pools_of(self, key: str) -> tuple[str, ...]:
        """Patterns of the pools that the daemon with `key` (hexadecimal) may read; none where it is not allowed."""
        known = self._allowed.get(bytes.fromhex(key))
        return known.pools if known else ()

    def name_of(self, key: bytes) -> str | None:
        """The name of the daemon that is allowed under `key`, or None."""
        known = self._allowed.get(key)
        return known.name if known else None

    def key_of(self, name: str) -> bytes | None:
        """The key that the daemon called `name` is allowed under, or None.

        A name has one key: that of its own line, else that of the longest pattern that covers it.
        """
        if name in self._exact:
            return self._exact[name]
        return next((key for prefix, key in self._patterns if name.startswith(prefix)), None)

    def speaks_for(self, key: str, name: str) -> bool:
        """Whether `key` (hexadecimal) is that of the daemon called `name`."""
        return self.key_of(name) == bytes.fromhex(key)

    def secure_server(self, socket: "zmq.Socket[bytes]") -> None:
        """Makes a socket that is not bound yet accept CURVE connections that the ZAP handler allows, and no others."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.pair.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def secure_client(self, socket: "zmq.Socket[bytes]", server: bytes) -> None:
        """Makes a socket that is not connected yet talk to the daemon with the public key `server`, and no other."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.pair.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.pair.secret)


class ZapHandler:
    """Answers libzmq's question for each new connection of `context`: may this key come in?"""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", trust: Trust, on_rejected: OnRejected) -> None:
        self._trust = trust
        self._on_rejected = on_rejected
        socket = context.socket(zmq.REP)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(ZAP_ENDPOINT)
        self._pump = SocketPump(socket, self._asked)

    def close(self) -> None:
        """Nobody comes in any more."""
        self._pump.close()

    def _asked(self, parts: list[bytes]) -> None:
        """RFC 27: version, request id, domain, address, routing id, mechanism, credentials."""
        key = parts[6] if len(parts) == 7 and parts[5] == b"CURVE" and parts[2] == ZAP_DOMAIN else b""
        number = parts[1] if len(parts) > 1 else b""
        address = parts[3].decode(errors="replace") if len(parts) > 3 else ""
        if len(key) == KEY_BYTES and self._trust.name_of(key) is not None:
            self._pump.send([_ZAP_VERSION, number, b"200", b"OK", key.hex().encode(), b""])
            return
        self._pump.send([_ZAP_VERSION, number, b"400", b"not on the allow-list", b"", b""])
        self._on_rejected(Rejection(Reason.UNKNOWN_KEY, key.hex(), address))


_HANDSHAKE_FAILURES: Final = zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL


class HandshakeMonitor:
    """Hears from libzmq who failed the handshake before any key could be asked for."""

    def __init__(self, socket: "zmq.Socket[bytes]", on_rejected: OnRejected) -> None:
        self._on_rejected = on_rejected
        self._watched = socket
        self._pump = SocketPump(socket.get_monitor_socket(_HANDSHAKE_FAILURES), self._failed)

    def close(self) -> None:
        """Hears no more; call it before the watched socket is closed."""
        self._watched.monitor(None, 0)
        self._pump.close(linger_ms=0)

    def _failed(self, _parts: list[bytes]) -> None:
        # Why, libzmq says only if it has read the greeting before the other end gave up: not worth a label.
        self._on_rejected(Rejection(Reason.NO_HANDSHAKE))
