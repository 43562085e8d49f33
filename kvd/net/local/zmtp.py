"""ZMTP 3 without security, between a daemon's ROUTER and DEALERs of workers and peers: bytes in, frames out, no I/O.

The protocol is https://rfc.zeromq.org/spec/23 and /37. libzmq's own ROUTER cannot be bounded: it keeps the parts of a
message until the last one arrives, however many there are, and routing ids as large as a message. Here a message has
one part, and each length is checked before its bytes are kept.
"""

from typing import Final, NamedTuple

from kvd.errors import ErrorCode, KvdError, refusal

GREETING_BYTES: Final = 64
MAX_COMMAND_BYTES: Final = 1024
"""A DEALER's READY has about 60 bytes when its routing id has 16; a PING has at most 23."""
MAX_ROUTING_ID_BYTES: Final = 255

_MORE: Final = 1
_LONG: Final = 2
_COMMAND: Final = 4
_READY: Final = b"\x05READY"
_PING: Final = b"\x04PING"


class Ready(NamedTuple):
    """The other end's half of the handshake; a ROUTER answers it with `WELCOME`."""

    routing_id: bytes
    """Empty if it is a ROUTER."""


class Ping(NamedTuple):
    """A heartbeat of a DEALER; answer it with `pong`. Daemons send none: an answer could come to another connection."""

    context: bytes


Received = Ready | Ping | bytes


def header(size: int, flags: int = 0) -> bytes:
    """What precedes a frame of `size` bytes."""
    return bytes((flags, size)) if size < 256 else bytes((flags | _LONG,)) + size.to_bytes(8, "big")


def command(body: bytes) -> bytes:
    """A command frame."""
    return header(len(body), _COMMAND) + body


def pong(ping: Ping) -> bytes:
    """The answer to a heartbeat."""
    return command(b"\x04PONG" + ping.context)


_TYPE: Final = b"\x0bSocket-Type\x00\x00\x00\x06"
GREETING: Final = (b"\xff" + bytes(8) + b"\x7f\x03\x01NULL").ljust(GREETING_BYTES, b"\0")
WELCOME: Final = command(_READY + _TYPE + b"ROUTER")
"""A ROUTER's half of the handshake. A DEALER that never gets it has sent nothing that counts."""


def hello(routing_id: bytes) -> bytes:
    """All that a DEALER says before its first message."""
    size = len(routing_id).to_bytes(4, "big")
    return GREETING + command(_READY + _TYPE + b"DEALER\x08Identity" + size + routing_id)


class Decoder:
    """Decodes what one DEALER sends, or with `of_router` one ROUTER; holds at most one unfinished frame."""

    def __init__(self, max_message_bytes: int, *, of_router: bool = False) -> None:
        self._max_message_bytes = max_message_bytes
        self._of_router = of_router
        self._bytes = bytearray()
        self._greeted = self._ready = False

    @property
    def unfinished(self) -> int:
        """Bytes of the incomplete frame, once `next` has returned None."""
        return len(self._bytes)

    def add(self, data: bytes | memoryview) -> None:
        """Adds bytes that came, which cost nothing until `next` is called."""
        self._bytes += data

    def next(self) -> Received | None:
        """The next frame that is whole: `Ready` first, then messages and heartbeats; None if there is none.

        Raises:
            BadRequest: `TOO_LARGE`, a frame or routing id above its bound; `BAD_MESSAGE`, anything else that a ROUTER
                or a DEALER with a routing id would not send, or a message in several parts. Drop the connection.

        """
        if not self._greeted:
            if len(self._bytes) < GREETING_BYTES:
                return None
            self._greet(self._take(0, GREETING_BYTES))
        return self._next()

    def feed(self, data: bytes | memoryview) -> list[Received]:
        """All frames that `data` completes.

        Raises:
            BadRequest: as `next`; those before it are lost.

        """
        self.add(data)
        return list(iter(self.next, None))

    def _next(self) -> Received | None:
        flags = self._bytes[0] if self._bytes else 0
        if flags & ~(_LONG | _COMMAND):
            what = "a message in several parts" if flags & _MORE else f"a frame with flags {flags:#04x}"
            raise _bad(f"{what}; send messages of one part")
        is_command = bool(flags & _COMMAND)
        start = 9 if flags & _LONG else 2
        if len(self._bytes) < start:
            return None
        size = int.from_bytes(self._bytes[1:start], "big")
        bound = self._max_message_bytes if self._ready and not is_command else MAX_COMMAND_BYTES
        if size > bound:
            raise refusal(ErrorCode.TOO_LARGE, f"a frame announces {size} bytes, the bound is {bound}")
        if len(self._bytes) < start + size:
            return None
        body = self._take(start, start + size)
        if self._ready and not is_command:
            return body
        if self._ready and not self._of_router and body.startswith(_PING) and len(body) >= len(_PING) + 2:
            return Ping(body[len(_PING) + 2 :])  # behind the time to live, which is the sender's business
        if self._ready or not is_command or not body.startswith(_READY):
            due = "READY" if not self._ready else "a message" if self._of_router else "a message or PING"
            raise _bad(f"{body[:8]!r} where {due} is due")
        routing_id = _routing_id(body)
        if not routing_id and not self._of_router:
            raise _bad("no routing id; a worker's is the session id that `Attached` gave it")
        self._ready = True
        return Ready(routing_id)

    def _greet(self, greeting: bytes) -> None:
        # The minor version and the eight bytes after the first one are free.
        if any(greeting[part] != GREETING[part] for part in (slice(1), slice(9, 11), slice(12, 32))):
            raise _bad(f"no greeting of ZMTP 3.x without security: {greeting[:32].hex()}")
        self._greeted = True

    def _take(self, start: int, end: int) -> bytes:
        with memoryview(self._bytes) as view:
            content = bytes(view[start:end])
        del self._bytes[:end]
        return content


def _routing_id(ready: bytes) -> bytes:
    """The routing id among the properties of READY. Any bytes will do: session ids are random."""
    routing_id, at = b"", len(_READY)
    while at < len(ready):
        name = at + 1 + ready[at]
        end = name + 4 + int.from_bytes(ready[name : name + 4], "big")
        if end > len(ready):
            raise _bad("a property of READY exceeds READY")
        if ready[at + 1 : name].lower() == b"identity":
            routing_id = ready[name + 4 : end]
        at = end
    if len(routing_id) > MAX_ROUTING_ID_BYTES:
        text = f"a routing id of {len(routing_id)} bytes, the bound is {MAX_ROUTING_ID_BYTES}"
        raise refusal(ErrorCode.TOO_LARGE, text)
    return routing_id


def _bad(what: str) -> KvdError:
    return refusal(ErrorCode.BAD_MESSAGE, what)
