"""Connects to Unix sockets, by names that tickets give."""

import ctypes
import errno
import os
import socket
import stat
from functools import partial
from typing import Final

from kvd import foreign
from kvd.errors import BadRequest, ErrorCode, on_error, refusal
from kvd.net.local.listener import hang_up
from kvd.net.unix import is_trusted, take_descriptors
from kvd.protocol.address import PEERS

_PATH: Final = os.O_PATH | os.O_CLOEXEC

REFUSED_MS: Final = 2000
"""Pause after a name was `REFUSED`: what it leads to seldom changes, and to find out that again takes time."""

_MAX_STEPS: Final = 40
"""Names on a path that has links, and in these: /var/run is one, a volume of Kubernetes has another."""

_OPENAT2: Final = 437
"""Number of a system call that the C library does not know; one on all architectures."""
_AT_FDCWD: Final = -100
_RESOLVE_NO_SYMLINKS: Final = 4


class NobodyBehindLinksError(OSError):
    """Nobody listens where a path with links leads."""


REFUSED: Final = (BadRequest, NobodyBehindLinksError)


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

    By other names, of links in the file system, each ticket could have a peer more that takes that daemon's places.

    Raises:
        OSError: as `connect_to`.
        BadRequest: `NOT_PERMITTED`, it was bound under another name, or `look_up` refuses the path.
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

    Links are followed only if root or our own user made them: by others' those who may not connect to a daemon could
    have us do it, again and again. Links may form a maze, too, in which the kernel walks for 10 ms at each look.

    Raises:
        OSError: nothing is there, or no descriptor is left; `NobodyBehindLinksError` if there is a link.
        BadRequest: `NOT_PERMITTED`, it leads through another user's link, or on and on.

    """
    size = ctypes.sizeof(_WITHOUT_LINKS)
    held: int = _libc.syscall(_OPENAT2, _AT_FDCWD, os.fsencode(path), ctypes.byref(_WITHOUT_LINKS), size)
    if held >= 0:
        return held
    if (number := ctypes.get_errno()) not in (errno.ELOOP, errno.ENOSYS, errno.EPERM):  # or a container's filter has it
        raise OSError(number, os.strerror(number), path)
    try:
        return _walk(path)
    except OSError as error:
        raise NobodyBehindLinksError(error.errno, error.strerror, path) from error


def _walk(path: str) -> int:
    """As `look_up`, name by name: there is a link, or the kernel is older than 5.6."""
    held, names, steps = os.open("/", _PATH), _reversed(path), 0
    with on_error(lambda: os.close(held)):  # whichever it is by then
        while names:
            steps += 1
            inner = os.open(names.pop(), _PATH | os.O_NOFOLLOW, dir_fd=held)
            with on_error(partial(os.close, inner)):
                target = _target(inner, path, steps)
            if target is None:
                os.close(held)
                held = inner
                continue
            os.close(inner)
            names += _reversed(target)
            if target.startswith("/"):
                root = os.open("/", _PATH)
                os.close(held)
                held = root
    return held


def _reversed(path: str) -> list[str]:
    return [name for name in reversed(path.split("/")) if name]


def _target(held: int, path: str, steps: int) -> str | None:
    """Where a link leads, after so many `steps`; None if it is none."""
    if steps > _MAX_STEPS:
        raise refusal(ErrorCode.NOT_PERMITTED, f"{path} leads through its links in more than {_MAX_STEPS} steps")
    status = os.fstat(held)
    if not stat.S_ISLNK(status.st_mode):
        return None
    # Those of /proc are root's or ours, and lead where their process likes.
    if not is_trusted(status.st_uid) or status.st_dev == os.stat("/proc").st_dev:
        text = f"{path} leads through a link of user {status.st_uid}, or of /proc: only root's and our own user's count"
        raise refusal(ErrorCode.NOT_PERMITTED, f"{text}; name it without links")
    return os.readlink("", dir_fd=held)
