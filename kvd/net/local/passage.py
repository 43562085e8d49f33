"""The way from a DEALER of libzmq's to a peer's Unix socket."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final

from kvd.net.local.listener import hang_up
from kvd.net.local.relay import PrivateListener, Relay
from kvd.net.options import RECONNECT_MAX_MS, RECONNECT_MS
from kvd.net.unix import take_descriptors

_FIRST_PAUSE: Final = RECONNECT_MS / 1000
_LAST_PAUSE: Final = RECONNECT_MAX_MS / 1000


class Passage:
    """A DEALER that connects to `address` talks to whoever listens at `path`, if `admits` says so of the connection.

    It is tried again and again, after pauses that double until somebody answers.

    Raises:
        OSError: no descriptor is left, or nothing can be made in `folder`.

    """

    def __init__(self, path: str, folder: str, admits: Callable[[socket.socket], bool]) -> None:
        self._path = path
        self._admits = admits
        self._loop = asyncio.get_running_loop()
        self._inside: socket.socket | None = None
        """The DEALER's connection, while nobody is at the other end."""
        self._relay: Relay | None = None
        self._again: asyncio.TimerHandle | None = None
        self._pause = 0.0
        self._listener = PrivateListener(folder)
        self._loop.add_reader(self._listener.socket.fileno(), self._accept)

    @property
    def address(self) -> str:
        """Where the DEALER connects."""
        return f"ipc://{self._listener.path}"

    @property
    def relays(self) -> list[Relay]:
        """The one that there is, or none."""
        return [self._relay] if self._relay else []

    def close(self) -> None:
        """Ends the connection."""
        self._loop.remove_reader(self._listener.socket.fileno())
        self._listener.close()
        self._drop()

    def _drop(self) -> None:
        if self._again is not None:
            self._again.cancel()
        if self._inside is not None:
            self._inside.close()
            self._inside = None
        if self._relay is not None:
            self._relay.close()

    def _accept(self) -> None:
        try:
            inside, _ = self._listener.socket.accept()
        except OSError:  # it has gone, or no descriptor is left: it comes again
            return
        self._drop()  # the DEALER has given that connection up
        inside.setblocking(False)
        self._inside = inside
        self._try_in(self._pause)

    def _try_in(self, seconds: float) -> None:
        self._pause = min(max(2 * self._pause, _FIRST_PAUSE), _LAST_PAUSE)
        self._again = self._loop.call_later(seconds, self._try) if seconds else None
        if not seconds:
            self._try()

    def _try(self) -> None:
        if self._inside is None:
            return
        outside = None
        with contextlib.suppress(OSError):
            outside = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            outside.setblocking(False)
            take_descriptors(outside, take=False)
            outside.connect(self._path)
            if self._admits(outside):
                inside, self._inside = self._inside, None
                self._relay = Relay(outside, inside, self._ended)
                return
        if outside is not None:
            hang_up(outside)
        self._try_in(self._pause)

    def _ended(self, relay: Relay) -> None:
        self._relay = None
        if relay.inbound.bytes:
            self._pause = 0.0
