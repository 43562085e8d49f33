"""The processes that opened sessions: tells when each has ended, by a pidfd."""

import asyncio
import errno
import os
import select
import socket
from collections.abc import Callable
from typing import Final

from kvd.net.interface import ProcessEnded

_SO_PEERPIDFD: Final = 77
"""A pidfd of whoever connected, in whichever PID namespace; since Linux 6.5."""


class WatchedProcesses:
    """Calls `on_ended` once for each process that is watched when it ends."""

    def __init__(self, on_ended: Callable[[ProcessEnded], None]) -> None:
        self._on_ended = on_ended
        self._loop = asyncio.get_running_loop()
        self._pidfds: dict[int, int] = {}
        """By connection."""

    def watch(self, connection: int, connected: socket.socket, pid: int) -> bool:
        """Whether `on_ended` will be called for the process that connected; never before this has returned."""
        try:
            pidfd = _peer_pidfd(connected, pid)
        except ProcessLookupError:
            self._loop.call_soon(self._on_ended, ProcessEnded(connection))
            return True
        if pidfd < 0:
            return False
        self._pidfds[connection] = pidfd
        self._loop.add_reader(pidfd, self._ended, connection)
        return True

    def forget(self, connection: int) -> None:
        """Watches the process that opened this session no more."""
        pidfd = self._pidfds.pop(connection, -1)
        if pidfd >= 0:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)

    def close(self) -> None:
        """Forgets all."""
        for connection in list(self._pidfds):
            self.forget(connection)

    def _ended(self, connection: int) -> None:
        self.forget(connection)
        self._on_ended(ProcessEnded(connection))


def _peer_pidfd(connected: socket.socket, pid: int) -> int:
    """A pidfd of the process that connected; -1 if none can be had.

    Raises:
        ProcessLookupError: it has ended.

    """
    try:
        return connected.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL):  # it has been reaped
            raise ProcessLookupError(error.errno, "the process that connected has ended") from error
    return _open_pidfd(connected, pid)


def _open_pidfd(connected: socket.socket, pid: int) -> int:
    """The same on older kernels, which only tell the number."""
    if pid <= 0:
        return -1
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return -1
    # The number may have become another process's, but not as long as the one that connected keeps the connection.
    poller = select.poll()
    poller.register(connected, select.POLLRDHUP)
    if poller.poll(0):
        os.close(pidfd)
        return -1
    return pidfd
