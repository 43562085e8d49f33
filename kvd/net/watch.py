"""Watches a socket for what can be read, its end included, on whichever loop."""

import asyncio
import select
from collections.abc import Callable


class ReadWatch:
    """Has the loop call `on_readable` while a socket can be read; `stop` it before the socket is closed.

    uvloop watches no more after one call where the socket has an error, which it has if the other end closed without
    reading all (libuv's `uv__poll_io`, uvloop's `UVPoll._fatal_error`): what that call left unread, be it only the end,
    would never be read.
    """

    def __init__(
        self, descriptor: int, on_readable: Callable[[], object], loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._descriptor = descriptor
        self._on_readable = on_readable
        self._loop = loop or asyncio.get_running_loop()
        self._watching = False
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
        if self._watching and self._errors.poll(0):
            self._loop.call_soon(self._again)  # uvloop drops what is added before this has returned

    def _again(self) -> None:
        if self._watching:
            self.stop()
            self.start()
