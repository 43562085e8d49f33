"""Connects to Unix sockets, by names that tickets give."""

import os
import socket
import stat
from functools import lru_cache, partial
from typing import Final

from kvd import foreign
from kvd.errors import ErrorCode, on_error, refusal
from kvd.net.local.listener import hang_up
from kvd.net.unix import is_trusted, take_descriptors
from kvd.protocol.address import PEERS

_PATH: Final = os.O_PATH | os.O_CLOEXEC

REFUSED_MS: Final = 2000
"""Pause after a path was refused: what it leads to seldom changes, and to find out that again takes time."""


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


def connect_to_peer(path: str, *, expected: bool = False) -> socket.socket:
    """As `connect_to`, where a socket listens that was bound under that very name.

    By other names each ticket could have a peer more that takes that daemon's places.

    Raises:
        OSError: as `connect_to`.
        BadRequest: `NOT_PERMITTED`, it was bound under another name, or `look_up` refuses the path.
        Unavailable: `OVERLOADED`, too many descriptors of that user's are yet to be closed, as this one may be then.

    """
    # By the file that was looked at: its name may lead elsewhere by now.
    held = look_up(path, expected=expected)
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


def look_up(path: str, *, expected: bool = False) -> int:
    """A descriptor of the file at an absolute `path`, which can be connected to by /proc, and not be read.

    Another user's folder is looked into only if an operator `expected` a daemon there: its owner could have whoever
    does that wait in the kernel, where not even SIGKILL ends it. Nor are links followed: one peer would have any number
    of names, for those to try who may not connect to it, and links may form a maze. Daemons tell their own path without
    links, and peer files are read so (`kvd.host.without_links`).

    Raises:
        OSError: nothing is there, or no descriptor is left.
        BadRequest: `NOT_PERMITTED`, there is a link in the path, or a folder of another user.

    """
    if not expected:
        _check_folder(os.path.dirname(path))
    held = os.open(path, _PATH | os.O_NOFOLLOW)
    with on_error(partial(os.close, held)):
        _check_is_no_link(os.fstat(held), path)
    return held


@lru_cache(maxsize=1024)
def _check_folder(folder: str) -> None:
    """Checks a folder and all that it is in, once: only those who are trusted can change what was found."""
    held = os.open("/", _PATH)
    try:
        for name in filter(None, folder.split("/")):
            inner = os.open(name, _PATH | os.O_NOFOLLOW, dir_fd=held)
            os.close(held)
            held = inner
            status = os.fstat(held)
            _check_is_no_link(status, folder)
            if not is_trusted(status.st_uid):
                text = (
                    f"{folder} is, or lies in, a folder of another user: have the daemon's socket in those of root or "
                )
                raise refusal(ErrorCode.NOT_PERMITTED, f"{text}our own user, or name it in the peer file (`peers`)")
    finally:
        os.close(held)


def _check_is_no_link(status: os.stat_result, path: str) -> None:
    if stat.S_ISLNK(status.st_mode):
        text = f"{path} leads through a link of the file system; name it as it is without links (`realpath`)"
        raise refusal(ErrorCode.NOT_PERMITTED, text)
