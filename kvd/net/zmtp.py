"""ZMTP 3 without keys as the end that accepts speaks it, for DEALERs of libzmq: bytes in, frames out, no I/O.

The protocol is that of https://rfc.zeromq.org/spec/23 and /37. libzmq's own ROUTER keeps the parts of a message until
the last one has come, however many there are, and routing ids as large as a message may be. Here a message has one
part, and everything has its bound before memory is taken for it.
"""

from collections.abc import Iterator
from typing import Final, NoReturn

from msgspec import Struct

from kvd.errors import BadRequest, ErrorCode

GREETING_BYTES: Final = 64
MAX_COMMAND_BYTES: Final = 1024
"""READY has some 60 bytes of DEALERs whose routing id has 16, PING at most 23."""
MAX_IDENTITY_BYTES: Final = 255
MAX_HEADER_BYTES: Final = 9

_MORE: Final = 1
_LONG: Final = 2
_COMMAND: Final = 4
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0")


class Ready(Struct, frozen=True):
    """The handshake is over, once `WELCOME` is sent; `identity` is the routing id, empty where it has none."""

    identity: bytes


class Ping(Struct, frozen=True):
    """A heartbeat, to answer with `pong`."""

    context: bytes


Received = Ready | Ping | bytes


def header(size: int, flags: int = 0) -> bytes:
    """What goes before the `size` bytes of a frame."""
    return bytes((flags, size)) if size < 256 else bytes((flags | _LONG,)) + size.to_bytes(8, "big")


def command(body: bytes) -> bytes:
    """A command as it travels."""
    return header(len(body), _COMMAND) + body


def pong(ping: Ping) -> bytes:
    """The answer to a heartbeat."""
    return command(b"\x04PONG" + ping.context)


GREETING: Final = _GREETING.ljust(GREETING_BYTES, b"\0")
"""What we send first."""
WELCOME: Final = command(b"\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER")
"""Our half of the handshake. Until it is sent a DEALER keeps its messages for another attempt."""


class Decoder:
    """What one DEALER sends. Holds one unfinished frame and what was fed last."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._bytes = bytearray()
        self._greeted = False
        self._ready = False

    def feed(self, data: bytes | memoryview) -> Iterator[Received]:
        """Takes `data` in; what it completes is decoded as it is asked for, all of it before more is fed.

        Raises:
            BadRequest: while iterated over. `TOO_LARGE`, a frame or routing id above its bound; `BAD_MESSAGE`, what
                arrived is not ZMTP 3.x of a DEALER without keys, or a message in several parts. Nothing on this
                connection can be trusted any more.

        """
        self._bytes += data
        return iter(self._next, None)

    def _next(self) -> Received | None:
        if not self._greeted:
            if len(self._bytes) < GREETING_BYTES:
                return None
            self._greet(self._take(0, GREETING_BYTES))
        flags = self._bytes[0] if self._bytes else 0
        if flags & ~(_LONG | _COMMAND):
            what = "a message in several parts" if flags & _MORE else f"a frame with flags {flags:#04x}"
            raise BadRequest(ErrorCode.BAD_MESSAGE, f"{what}; send messages of one part")
        start = MAX_HEADER_BYTES if flags & _LONG else 2
        if len(self._bytes) < start:
            return None
        size = int.from_bytes(self._bytes[1:start], "big")
        bound = self._max_message_bytes if self._ready and not flags & _COMMAND else MAX_COMMAND_BYTES
        if size > bound:
            raise BadRequest(ErrorCode.TOO_LARGE, f"a frame announces {size} bytes, the bound is {bound}")
        if len(self._bytes) < start + size:
            return None
        body = self._take(start, start + size)
        if flags & _COMMAND:
            return self._ping(body) if self._ready else self._welcome(body)
        return body if self._ready else self._wrong("a message before READY")

    def _take(self, start: int, end: int) -> bytes:
        with memoryview(self._bytes) as view:
            content = bytes(view[start:end])
        del self._bytes[:end]
        return content

    def _greet(self, greeting: bytes) -> None:
        # The eight bytes after the first, and the minor version, may be any.
        if greeting[:1] + greeting[9:11] + greeting[12:32] != _GREETING[:1] + _GREETING[9:11] + _GREETING[12:32]:
            self._wrong(f"no greeting of ZMTP 3.x without keys: {greeting[:32].hex()}")
        self._greeted = True

    def _welcome(self, body: bytes) -> Ready:
        if not body.startswith(b"\x05READY"):
            self._wrong(f"a command {body[:8]!r} before READY")
        properties = dict(_properties(body[6:]))
        kind, identity = properties.get(b"socket-type"), properties.get(b"identity", b"")
        if kind != b"DEALER":
            self._wrong(f"a socket of type {kind!r}, not a DEALER")
        if len(identity) > MAX_IDENTITY_BYTES:
            text = f"a routing id of {len(identity)} bytes, the bound is {MAX_IDENTITY_BYTES}"
            raise BadRequest(ErrorCode.TOO_LARGE, text)
        if identity.startswith(b"\0"):
            self._wrong("a routing id that begins with a zero: those are given by us")
        self._ready = True
        return Ready(identity)

    def _ping(self, body: bytes) -> Ping:
        if not body.startswith(b"\x04PING") or not 7 <= len(body) <= 7 + 16:
            self._wrong(f"a command {body[:8]!r} after READY, not a PING of at most 16 bytes")
        return Ping(body[7:])

    @staticmethod
    def _wrong(what: str) -> NoReturn:
        raise BadRequest(ErrorCode.BAD_MESSAGE, what)


def _properties(body: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The properties of READY, their names in lower case."""
    at = 0
    while at < len(body):
        name = at + 1 + body[at]
        value = name + 4 + int.from_bytes(body[name : name + 4], "big")
        if value > len(body) or name + 4 > len(body):
            raise BadRequest(ErrorCode.BAD_MESSAGE, "a property of READY that is longer than READY")
        yield body[at + 1 : name].lower(), body[name + 4 : value]
        at = value
