"""Unix sockets: paths with a file mode, the process at the other end, and a watch for what can be read."""

import asyncio
import contextlib
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Final, NamedTuple

MAX_PATH_BYTES: Final = 107
"""The longest path that the kernel accepts for a Unix socket."""

_SO_PEERPIDFD: Final = 77
"""A pidfd of whoever connected, in whichever PID namespace; since Linux 6.5."""

_CLOCK_SECONDS: Final = 2.0
"""By how much the clock may have been set meanwhile."""
_SO_PASSRIGHTS: Final = 83
"""Whether a socket takes descriptors; since Linux 6.16. Connections have it from the listener that they connect to."""

MAX_PASSED: Final = 253
"""Descriptors that the kernel passes with one message."""

_UCRED: Final = struct.Struct("=iII")


class Credentials(NamedTuple):
    """The process at the other end. `pid` is 0 if its PID namespace is not visible to us."""

    pid: int
    uid: int
    gid: int


def credentials(connected: socket.socket) -> Credentials:
    """Who was at the other end when the connection was made; if we connected, who listened."""
    return Credentials(*_UCRED.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def take_descriptors(sock: socket.socket, *, take: bool) -> bool:
    """Says whether a socket takes descriptors; False if this kernel lets it take all.

    Refused ones fail at their sender with EPERM; none is ever closed here. An unaccepted connection is its listener's.
    """
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, int(take))
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
        return False
    return True


class Party(NamedTuple):
    """A user's process at the other end; `process` is 0 where it cannot be told from the user's others."""

    uid: int
    process: int


def party_at(connected: socket.socket) -> Party:
    """Whose connection this is, so that one process can be given a share.

    All processes in other PID namespaces have the number 0. A pidfd's inode is the process's own since Linux 6.9.

    Raises:
        OSError: the process has ended.

    """
    pid, uid, _ = credentials(connected)
    pidfd = peer_pidfd(connected, pid)
    if pidfd < 0:
        return Party(uid, pid)
    try:
        return Party(uid, os.fstat(pidfd).st_ino if _pidfds_differ() else pid)
    finally:
        os.close(pidfd)


@cache
def _pidfds_differ() -> bool:
    """Whether pidfds have a file system of their own; before, one inode is that of all anonymous files."""
    anonymous, pidfd = os.eventfd(0), os.pidfd_open(os.getpid())
    try:
        return os.fstat(anonymous).st_dev != os.fstat(pidfd).st_dev
    finally:
        os.close(anonymous)
        os.close(pidfd)


@contextlib.contextmanager
def created_with(mode: int) -> Iterator[None]:
    """Files made inside have `mode` from the start; setting it afterwards would leave a gap."""
    before = os.umask(0o777 & ~mode)
    try:
        yield
    finally:
        os.umask(before)


def is_trusted(uid: int) -> bool:
    """Whether this is root or our own user: all others share bounds, so that room is left for these two."""
    return uid in (0, os.geteuid())


def peer_pidfd(connected: socket.socket, pid: int, *, listens: bool = False) -> int:
    """A pidfd of the process at the other end, whose number is `pid`; -1 if none can be had.

    It connected to us, or `listens` where we connected.

    Raises:
        ProcessLookupError: it has ended.

    """
    try:
        return connected.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL):  # it has been reaped
            raise ProcessLookupError(error.errno, "the process at the other end has ended") from error
    return _open_pidfd(connected, pid, listens=listens)


def _open_pidfd(connected: socket.socket, pid: int, *, listens: bool) -> int:
    """The same on older kernels, which only tell the number."""
    if pid <= 0:
        return -1
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return -1
    if listens and _is_younger(pid, connected.getpeername()):  # whoever inherited the socket keeps the connection
        os.close(pidfd)
        raise ProcessLookupError(errno.ESRCH, "the process that listened has ended, and its number is another's")
    # The number may have become another process's, but not as long as the one that connected keeps the connection.
    poller = select.poll()
    poller.register(connected, select.POLLRDHUP)
    if poller.poll(0):
        os.close(pidfd)
        return -1
    return pidfd


def readable(descriptor: int, seconds: float = 0.0) -> bool:
    """Waits up to `seconds`. Not by `select`, which takes no descriptor above 1023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _is_younger(pid: int, path: str) -> bool:
    """Whether a process began clearly after the socket at `path` was made."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        made = os.stat(path).st_ctime
    except OSError:
        return False
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted + ticks / os.sysconf("SC_CLK_TCK") > made + _CLOCK_SECONDS


class ReadWatch:
    """Has the loop call `on_readable` while a socket can be read; `stop` it before the socket is closed.

    uvloop watches no more after one call where the socket has an error, which it has if the other end closed without
    reading all (libuv's `uv__poll_io`, uvloop's `UVPoll._fatal_error`): what that call left unread, be it only the end,
    would never be read. So nothing is left to the loop once the other end has closed.
    """

    def __init__(
        self, descriptor: int, on_readable: Callable[[], object], loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._descriptor = descriptor
        self._on_readable = on_readable
        self._loop = loop or asyncio.get_running_loop()
        self._watching = self._goes_on = False
        self._errors = select.poll()
        self._errors.register(descriptor, 0)

    def start(self) -> None:
        """Watches; a second call does nothing."""
        if not self._watching:
            self._watching = True
            self._loop.add_reader(self._descriptor, self._readable)

    def stop(self) -> None:
        """Watches no more until `start`."""
        if self._watching:
            self._watching = False
            self._loop.remove_reader(self._descriptor)

    def _readable(self) -> None:
        self._on_readable()
        if self._watching and not self._goes_on and self._errors.poll(0):
            self._goes_on = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._goes_on = False
        if self._watching:
            self._readable()
