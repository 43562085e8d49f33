"""A Unix socket that is listened on, at the pace that the daemon keeps up with."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import Final

from kvd.net.interface import Intake
from kvd.net.options import BACKLOG

ACCEPT_PAUSE_SECONDS: Final = 0.5
"""Pause of accepting after the system had no descriptor for us."""


class Listener:
    """Listens at `path`, in the place of a dead process's socket there, and hands on who connects.

    Raises:
        OSError: nothing can be bound there.

    """

    def __init__(self, path: str, on_accepted: Callable[[socket.socket], None], intake: Intake) -> None:
        self._on_accepted = on_accepted
        self._intake = intake
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
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
        """Listens no more; the file is left."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
        if self._pause is not None:
            self._pause.cancel()
        self._socket.close()

    def _watch(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _accept_again(self) -> None:
        """Takes its turn at once: by the time that the loop tells of somebody, it is the others' again."""
        if self._socket.fileno() >= 0:
            self._watch()
            self._accept()

    def _accept(self) -> None:
        if not self._intake.admits(self._accept_again):
            self._loop.remove_reader(self._socket.fileno())
            return
        try:
            accepted, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError:
            self._loop.remove_reader(self._socket.fileno())
            self._pause = self._loop.call_later(ACCEPT_PAUSE_SECONDS, self._watch)
            return
        self._on_accepted(accepted)
