"""What Unix sockets have and others lack: a path with a file mode, and the kernel's word on who is at the other end."""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

MAX_PATH_BYTES: Final = 107
"""What the kernel takes as the path of a Unix socket."""

WITNESS: Final = "Peer-Address"
"""The property of a ZMQ message that has libzmq's own SO_PEERCRED, as text that ends in `:uid:gid:pid`."""

_UCRED: Final = struct.Struct("=iII")


class Credentials(NamedTuple):
    """The process at the other end. `pid` is 0 where it is in a PID namespace that we cannot see."""

    pid: int
    uid: int
    gid: int


def credentials(connected: socket.socket) -> Credentials:
    """Who was at the other end when the connection was made: of a listening process, who listened."""
    return Credentials(*_UCRED.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def user_of(witness: bytes) -> int:
    """The user in a message's `WITNESS`; -1 where there is none."""
    return int(witness.rsplit(b":", 3)[1]) if witness else -1


@contextlib.contextmanager
def created_with(mode: int) -> Iterator[None]:
    """Files made inside get `mode` from their first moment: a mode set afterwards would leave a gap."""
    before = os.umask(0o777 & ~mode)
    try:
        yield
    finally:
        os.umask(before)
