"""Accepts connections on a Unix socket no faster than the daemon keeps up."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import Final

from kvd import limits
from kvd.net.interface import Intake
from kvd.net.options import BACKLOG

MAX_CONNECTIONS: Final = 2 * limits.MAX_WORKERS
"""Open connections of one listener; further ones are hung up on, so that idle ones cannot use up our descriptors."""

ACCEPT_PAUSE_SECONDS: Final = 0.5
"""Pause of accepting after the system had no descriptor for us."""


class Listener:
    """Listens at `path`, replacing a dead process's socket there, and passes each connection to `on_accepted`.

    Raises:
        OSError: nothing can be bound there.

    """

    def __init__(self, path: str, on_accepted: Callable[[socket.socket], None], intake: Intake) -> None:
        self._on_accepted = on_accepted
        self._intake = intake
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            self._socket.bind(path)
            self._socket.listen(BACKLOG)
        except OSError:
            self._socket.close()
            raise
        self._watch()

    def close(self) -> None:
        """Stops listening; leaves the file."""
        self._unwatch()
        self._socket.close()

    def _watch(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _unwatch(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())

    def _accept_again(self) -> None:
        """Accepts at once: by the time the loop reports the socket as readable, it would be the others' turn again."""
        if self._socket.fileno() >= 0:
            self._watch()
            self._accept()

    def _accept(self) -> None:
        if not self._intake.admits(self._accept_again):
            self._unwatch()
            return
        try:
            accepted, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError:
            self._unwatch()
            self._loop.call_later(ACCEPT_PAUSE_SECONDS, self._watch)
            return
        accepted.setblocking(False)
        self._on_accepted(accepted)
