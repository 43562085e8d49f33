"""Decides which daemons may connect: CURVE on every socket between daemons, with our own ZAP handler.

Both ends of a connection must prove a key on the other's allow-list. libzmq checks that once per connection; since a
key may leave the list meanwhile, and one allowed daemon must not speak for another, the key of every message is checked
again (`Trust.speaks_for`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import zmq

from kvd.net.keys import KEY_BYTES, Allowed, KeyPair, covers
from kvd.net.zmq_socket import SocketPump

ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
ZAP_DOMAIN: Final = b"kvd.peers"
_ZAP_VERSION: Final = b"1.0"


class Reason(StrEnum):
    """Why a connection or message was rejected. A metric's label, so there are few."""

    UNKNOWN_KEY = "unknown_key"
    """its key is not on the allow-list"""
    WRONG_NAME = "wrong_name"
    """its key is allowed, but for another daemon's name"""
    OTHER_USER = "other_user"
    """it came over a Unix socket and runs as another user"""
    TOO_MANY = "too_many"
    """its user or process has too many connections, or no descriptor is left for another"""
    NO_HANDSHAKE = "no_handshake"
    """it failed before showing a key: NULL or PLAIN security, our key unknown to it, or garbage"""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A rejected connection or message."""

    reason: Reason
    key: str = ""
    """In hexadecimal; empty if the other end showed none."""
    address: str = ""
    """An IP address or user, if known."""


OnRejected = Callable[[Rejection], None]


class Trust:
    """Our own key, and the allowed daemons by public key. We always allow ourselves, with all pools."""

    def __init__(self, pair: KeyPair, name: str, allowed: Mapping[bytes, Allowed]) -> None:
        self.pair = pair
        self._own = name
        self.replace(allowed)

    def replace(self, allowed: Mapping[bytes, Allowed]) -> None:
        """Replaces the allow-list, for existing connections too."""
        own = allowed[self.pair.public].name if self.pair.public in allowed else self._own
        self._allowed = {**allowed, self.pair.public: Allowed(own if covers(own, self._own) else self._own)}
        self._exact = {known.name: key for key, known in self._allowed.items() if not known.name.endswith("*")}
        patterns = [(known.name[:-1], key) for key, known in self._allowed.items() if known.name.endswith("*")]
        self._patterns = sorted(patterns, key=lambda pattern: -len(pattern[0]))

    def pools_of(self, key: str) -> tuple[str, ...]:
        """Patterns of the pools that the daemon with `key` (hexadecimal) may read; empty if it is not allowed."""
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
        """Whether `key` (hexadecimal) belongs to the daemon called `name`."""
        return self.key_of(name) == bytes.fromhex(key)

    def secure_server(self, socket: "zmq.Socket[bytes]") -> None:
        """Makes an unbound socket accept only CURVE connections that the ZAP handler allows."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.pair.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def secure_client(self, socket: "zmq.Socket[bytes]", server: bytes) -> None:
        """Makes an unconnected socket talk only to the daemon with the public key `server`."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.pair.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.pair.secret)


class ZapHandler:
    """Tells libzmq for each new connection of `context` whether its key is allowed."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", trust: Trust, on_rejected: OnRejected) -> None:
        self._trust = trust
        self._on_rejected = on_rejected
        socket = context.socket(zmq.REP)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(ZAP_ENDPOINT)
        self._pump = SocketPump(socket, self._authenticate)

    def close(self) -> None:
        """Stops answering, so no further connection is accepted."""
        self._pump.close()

    def _authenticate(self, parts: list[bytes]) -> None:
        """RFC 27: version, request id, domain, address, routing id, mechanism, credentials."""
        key = parts[6] if len(parts) == 7 and parts[5] == b"CURVE" and parts[2] == ZAP_DOMAIN else b""
        number = parts[1] if len(parts) > 1 else b""
        address = parts[3].decode(errors="replace") if len(parts) > 3 else ""
        if address.startswith(":") and not address.startswith("::"):
            address = ""  # a Unix socket's: user and process are our own, of the relay
        if len(key) == KEY_BYTES and self._trust.name_of(key) is not None:
            self._pump.send([_ZAP_VERSION, number, b"200", b"OK", key.hex().encode(), b""])
            return
        self._pump.send([_ZAP_VERSION, number, b"400", b"not on the allow-list", b"", b""])
        self._on_rejected(Rejection(Reason.UNKNOWN_KEY, key.hex(), address))


_HANDSHAKE_FAILURES: Final = zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL


class HandshakeMonitor:
    """Reports connections that failed the handshake before showing a key."""

    def __init__(self, socket: "zmq.Socket[bytes]", on_rejected: OnRejected) -> None:
        self._on_rejected = on_rejected
        self._watched = socket
        self._pump = SocketPump(socket.get_monitor_socket(_HANDSHAKE_FAILURES), self._failed)

    def close(self) -> None:
        """Stops; call it before the watched socket is closed."""
        self._watched.monitor(None, 0)
        self._pump.close(linger_ms=0)

    def _failed(self, _parts: list[bytes]) -> None:
        # libzmq knows the reason only if it read the greeting before the other end gave up: not worth a label.
        self._on_rejected(Rejection(Reason.NO_HANDSHAKE))
