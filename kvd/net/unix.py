"""Unix sockets: paths with a file mode, and the credentials of the process at the other end."""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

MAX_PATH_BYTES: Final = 107
"""The longest path that the kernel accepts for a Unix socket."""

WITNESS: Final = "Peer-Address"
"""The property of a ZMQ message with what libzmq read from SO_PEERCRED: text that ends in `:uid:gid:pid`."""

_UCRED: Final = struct.Struct("=iII")


class Credentials(NamedTuple):
    """The process at the other end. `pid` is 0 if its PID namespace is not visible to us."""

    pid: int
    uid: int
    gid: int


def credentials(connected: socket.socket) -> Credentials:
    """Who was at the other end when the connection was made; if we connected, who listened."""
    return Credentials(*_UCRED.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def user_of(witness: bytes) -> int:
    """The user in a message's `WITNESS`; -1 if there is none."""
    return int(witness.rsplit(b":", 3)[1]) if witness else -1


@contextlib.contextmanager
def created_with(mode: int) -> Iterator[None]:
    """Files made inside have `mode` from the start; setting it afterwards would leave a gap."""
    before = os.umask(0o777 & ~mode)
    try:
        yield
    finally:
        os.umask(before)
