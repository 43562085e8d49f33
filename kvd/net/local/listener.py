"""Accepts connections on a Unix socket no faster than the daemon keeps up."""

import asyncio
import contextlib
import errno
import math
import os
import resource
import socket
from collections.abc import Callable
from typing import Final

import structlog

from kvd import foreign, limits
from kvd.limits import BACKLOG
from kvd.net.interface import Intake
from kvd.net.unix import credentials, take_descriptors

MAX_CONNECTIONS: Final = 2 * limits.MAX_WORKERS
"""Open connections of one listener; further ones are hung up on, so that idle ones cannot use up our descriptors."""

ACCEPT_PAUSE_SECONDS: Final = 0.5
"""Pause of accepting after the system had no descriptor for us."""

_LOGGED_SECONDS: Final = 10.0

_log = structlog.get_logger("kvd.net")


class Listener:
    """Listens at `path`, replacing a dead process's socket there, and passes each connection to `on_accepted`.

    Connections take no descriptors until that says so, where the kernel can refuse them. The last descriptors are left
    for what must not fail: then a connection gets `refusal`, and its end.

    Raises:
        OSError: nothing can be bound there.

    """

    def __init__(
        self, path: str, on_accepted: Callable[[socket.socket], None], intake: Intake, refusal: bytes = b""
    ) -> None:
        self._path = path
        self._on_accepted = on_accepted
        self._intake = intake
        self._refusal = refusal
        self._logged = -math.inf
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        try:
            take_descriptors(self._socket, take=False)
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
        except OSError as error:
            self._log_refusal(error.strerror)
            self._unwatch()
            self._loop.call_later(ACCEPT_PAUSE_SECONDS, self._watch)
            return
        accepted.setblocking(False)
        if is_scarce(accepted.fileno()):
            self._log_refusal(os.strerror(errno.EMFILE))
            hang_up(accepted, self._refusal)
        else:
            self._on_accepted(accepted)

    def _log_refusal(self, why: str | None) -> None:
        if self._loop.time() - self._logged >= _LOGGED_SECONDS:
            self._logged = self._loop.time()
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            hint = "raise LimitNOFILE"
            _log.error("connections are refused", path=self._path, reason=why, open_files=most, hint=hint)


def hang_up(accepted: socket.socket, last_words: bytes = b"") -> None:
    """Ends a connection that was never read."""
    with contextlib.suppress(OSError):
        accepted.send(last_words)
    if take_descriptors(accepted, take=False):
        accepted.close()
    else:
        uid = credentials(accepted).uid
        with contextlib.suppress(OSError):
            accepted.shutdown(socket.SHUT_RDWR)
        foreign.close_of(uid, accepted.detach())


def is_scarce(descriptor: int) -> bool:
    """Whether so few descriptors are left that strangers get none.

    A new descriptor has the lowest free number, so all below it are in use.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most != resource.RLIM_INFINITY and descriptor >= most - min(limits.RESERVED_DESCRIPTORS, most // 8)
