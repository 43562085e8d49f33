"""The processes that opened sessions: tells when each has ended, by a pidfd."""

import asyncio
import os
import socket
from collections.abc import Callable

from kvd.net.interface import ProcessEnded
from kvd.net.unix import peer_pidfd


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
            pidfd = peer_pidfd(connected, pid)
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
