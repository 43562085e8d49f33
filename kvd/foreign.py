"""Descriptors that other users' processes passed to us: closed on threads, each user's on a thread of its own.

Who closes the last descriptor of a file waits for what that takes: of a TCP socket its SO_LINGER, of a file in FUSE as
long as its server likes, of a memfd until its gigabytes are free. And a socket may still hold descriptors that nobody
has received. So neither the event loop nor a thread that others wait for closes any of them.
"""

import contextlib
import ctypes
import os
import stat
import struct
import threading
from collections import deque
from collections.abc import Iterable
from typing import Final

from kvd import limits
from kvd.errors import ErrorCode, refusal

NAME: Final = "kvd-close"
"""Of the threads."""

_NOBODY: Final = -1
"""Stands for all users beyond those that have a thread."""

_libc = ctypes.CDLL(None, use_errno=True)
_lock = threading.Lock()
_owners: dict[int, int] = {}
"""The user who passed a descriptor, until it is closed or kept."""
_waiting: dict[int, deque[int]] = {}
"""Descriptors that a user's thread is yet to close, by user; the first is being closed."""


def received(uid: int, descriptors: Iterable[int]) -> None:
    """Notes that these descriptors came from a process of user `uid`."""
    with _lock:
        _owners.update(dict.fromkeys(descriptors, uid))


def kept(descriptor: int) -> None:
    """A descriptor has been found to be what was asked for, and is ours from now on."""
    with _lock:
        _owners.pop(descriptor, None)


def close(descriptors: Iterable[int]) -> None:
    """Closes descriptors: those that were `received` later, on a thread; others at once."""
    for descriptor in descriptors:
        with _lock:
            uid = _owners.pop(descriptor, None)
            if uid is not None and uid not in _waiting and len(_waiting) >= limits.MAX_CLOSING_USERS:
                uid = _NOBODY
            queue = None if uid is None else _waiting.get(uid)
            if queue is not None:
                queue.append(descriptor)
            elif uid is not None:
                _waiting[uid] = deque((descriptor,))
        if uid is None:
            os.close(descriptor)
        elif queue is None:
            _start(uid)


def close_of(uid: int, *descriptors: int) -> None:
    """Closes descriptors of a user's process: sockets, with what is in them."""
    received(uid, descriptors)
    close(descriptors)


def waiting(uid: int) -> int:
    """How many descriptors of this user are yet to be closed."""
    with _lock:
        return len(_waiting.get(uid, ()))


def check(uid: int) -> None:
    """Checks that this user may have us take more.

    Raises:
        Unavailable: `OVERLOADED`, too many descriptors of its processes are yet to be closed.

    """
    if waiting(uid) >= limits.MAX_CLOSING_PER_USER:
        text = f"{waiting(uid)} descriptors that processes of user {uid} passed are not closed yet"
        fix = "their sockets linger, or their file system does not answer; try again later"
        raise refusal(ErrorCode.OVERLOADED, f"{text}: {fix}")


def _start(uid: int) -> None:
    try:
        threading.Thread(target=_close_all, args=(uid,), name=NAME, daemon=True).start()
    except RuntimeError:  # no thread can be had (`TasksMax`): rather a wait than a leak
        _close_all(uid)


def _close_all(uid: int) -> None:
    while True:
        with _lock:
            descriptor = _waiting[uid][0]
        with contextlib.suppress(OSError):  # closed all the same; it says what became of what was written
            os.close(descriptor)
        with _lock:
            _waiting[uid].popleft()
            if not _waiting[uid]:
                del _waiting[uid]
                return


_STATX_BYTES: Final = 256
_MODE: Final = struct.Struct("=H")
_MODE_AT: Final = 28
_NUMBERS: Final = struct.Struct("=II")
_DEVICE_AT: Final = 128
"""Where `struct statx` has them; the number of a device is two words."""
_AT_EMPTY_PATH: Final = 0x1000
_AT_STATX_DONT_SYNC: Final = 0x4000
_STATX_TYPE: Final = 0x1


def kind(descriptor: int) -> tuple[int, int]:
    """The type of the file behind a descriptor and, of a device, its number.

    Asks no file system: one in FUSE may never answer, which `fstat` waits for.

    Raises:
        OSError: the kernel does not say.

    """
    found = ctypes.create_string_buffer(_STATX_BYTES)
    if _libc.statx(descriptor, b"", _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC, _STATX_TYPE, found):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    (mode,) = _MODE.unpack_from(found, _MODE_AT)
    major, minor = _NUMBERS.unpack_from(found, _DEVICE_AT)
    return stat.S_IFMT(mode), os.makedev(major, minor)
