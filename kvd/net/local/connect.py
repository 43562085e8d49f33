"""Connects to Unix sockets, by names that tickets give."""

import ctypes
import errno
import os
import socket
import stat
from functools import partial
from typing import Final

from kvd import foreign
from kvd.errors import ErrorCode, KvdError, on_error, refusal
from kvd.net.local.listener import hang_up
from kvd.net.unix import take_descriptors
from kvd.protocol.address import PEERS

_PATH: Final = os.O_PATH | os.O_CLOEXEC

REFUSED_MS: Final = 2000
"""Pause after a path was refused: what it leads to seldom changes, and to find out that again takes time."""

_OPENAT2: Final = 437
"""Number of a system call that the C library does not know; one on all architectures."""
_AT_FDCWD: Final = -100
_RESOLVE_NO_SYMLINKS: Final = 4


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_WITHOUT_LINKS: Final = _OpenHow(_PATH, 0, _RESOLVE_NO_SYMLINKS)
_libc = ctypes.CDLL(None, use_errno=True)


def connect_to(path: str) -> socket.socket:
    """A connection that takes no descriptors, where the kernel can refuse them, and does not block.

    Raises:
        OSError: nobody listens there, too many wait to be accepted, or no descriptor is left.

    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with on_error(made.close):
        made.setblocking(False)
        take_descriptors(made, take=False)
        made.connect(path)
    return made


def connect_to_peer(path: str) -> socket.socket:
    """As `connect_to`, where a socket listens that was bound under that very name.

    By other names each ticket could have a peer more that takes that daemon's places.

    Raises:
        OSError: as `connect_to`.
        BadRequest: `NOT_PERMITTED`, it was bound under another name, or there is a link in the path.
        Unavailable: `OVERLOADED`, too many descriptors of that user's are yet to be closed, as this one may be then.

    """
    # By the file that was looked at: its name may lead elsewhere by now.
    held = look_up(path)
    try:
        foreign.check(os.fstat(held).st_uid)
        made = connect_to(f"/proc/self/fd/{held}")
    finally:
        os.close(held)
    name = made.getpeername()
    if name == path:
        return made
    hang_up(made)
    where = f"the socket of the daemon at {name}: name that" if name.endswith(PEERS) else "no daemon's socket"
    raise refusal(ErrorCode.NOT_PERMITTED, f"{path} leads to {where}")


def look_up(path: str) -> int:
    """A descriptor of the file at an absolute `path`, which can be connected to by /proc, and not be read.

    No link is followed: one peer would have any number of names, for those to try who may not connect to it, and links
    may form a maze. Daemons tell their own path without links, and peer files are read so (`kvd.host.without_links`).

    Raises:
        OSError: nothing is there, or no descriptor is left.
        BadRequest: `NOT_PERMITTED`, there is a link in the path.

    """
    size = ctypes.sizeof(_WITHOUT_LINKS)
    held: int = _libc.syscall(_OPENAT2, _AT_FDCWD, os.fsencode(path), ctypes.byref(_WITHOUT_LINKS), size)
    if held >= 0:
        return held
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EPERM):  # before Linux 5.6, or a container's filter has it
        return _walk(path)
    if number == errno.ELOOP:
        raise _has_link(path)
    raise OSError(number, os.strerror(number), path)


def _walk(path: str) -> int:
    """As `look_up`, name by name."""
    held = os.open("/", _PATH)
    for name in path.split("/")[1:]:
        folder = held
        try:
            held = os.open(name, _PATH | os.O_NOFOLLOW, dir_fd=folder)
        finally:
            os.close(folder)
        with on_error(partial(os.close, held)):
            if stat.S_ISLNK(os.fstat(held).st_mode):
                raise _has_link(path)
    return held


def _has_link(path: str) -> KvdError:
    text = f"{path} leads through a link of the file system; name it as it is without links (`realpath`)"
    return refusal(ErrorCode.NOT_PERMITTED, text)
