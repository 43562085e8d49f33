"""ZMTP 3.0 by hand, NULL security: what libzmq would never send. And connections to any address of a daemon."""

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 0.5
"""Seconds that an attacker waits for a daemon that does not read."""

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\x00") + bytes(32)


def connect(address: str) -> socket.socket:
    """A connection to `tcp://host:port`, `ipc://path` (with or without `#key`), `host:port` or a path."""
    place = address.partition("#")[0].removeprefix("ipc://")
    if place.startswith("/"):
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.settimeout(PATIENCE)
        try:
            made.connect(place)
        except OSError:
            made.close()
            raise
        return made
    host, _, port = place.removeprefix("tcp://").rpartition(":")
    # As bytes: for text Python imports a codec, which another user may not read.
    return socket.create_connection((host.strip("[]").encode(), int(port)), timeout=PATIENCE)  # type: ignore[arg-type]


def command(name: bytes, body: bytes) -> bytes:
    """A command frame."""
    content = bytes([len(name)]) + name + body
    return b"\x06" + struct.pack(">Q", len(content)) + content


def ready(routing_id: bytes = b"", kind: bytes = b"DEALER") -> bytes:
    """What follows the greeting: the kind of socket, and its routing id where it has one."""
    properties = [(b"Socket-Type", kind), *([(b"Identity", routing_id)] if routing_id else [])]
    body = b"".join(bytes([len(key)]) + key + struct.pack(">I", len(value)) + value for key, value in properties)
    return command(b"READY", body)


def frame(content: bytes, *, more: bool = False, declared: int | None = None) -> bytes:
    """A message's frame, with the length that is `declared` where it lies."""
    length = len(content) if declared is None else declared
    return bytes([2 | more]) + struct.pack(">Q", length) + content


@contextmanager
def speaking(address: str, routing_id: bytes = b"") -> Iterator[socket.socket]:
    """A connection that has said what ZMTP wants to hear."""
    with connect(address) as made:
        made.sendall(GREETING)
        made.recv(len(GREETING), socket.MSG_WAITALL)
        made.sendall(ready(routing_id))
        made.recv(1 << 12)  # libzmq takes a message before its own `READY` for a part of the handshake
        yield made
