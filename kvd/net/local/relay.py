"""Passes bytes between a peer's Unix socket and one of libzmq's, which proves keys, whoever of the two connects.

libzmq accepts whoever comes, aborts the process where no descriptor is left for that, and receives descriptors that
come with a message in its only thread. So it has sockets that only this process can connect to, and peers have ours.
"""

import asyncio
import contextlib
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterable
from typing import Final

from kvd.errors import BadRequest, Unavailable
from kvd.limits import BACKLOG, RECONNECT_MAX_MS, RECONNECT_MS
from kvd.net.local.connect import REFUSED_MS, connect_to_peer
from kvd.net.local.listener import ACCEPT_PAUSE_SECONDS, hang_up
from kvd.net.stream import receive_without_descriptors
from kvd.net.unix import ReadWatch, credentials, take_descriptors

CHUNK_BYTES: Final = 64 * 1024
_buffer: Final = memoryview(bytearray(CHUNK_BYTES))
"""Each read is passed on, or copied, at once."""


class PrivateListener:
    """Listens at `path`, of which only this process knows the way: the file in `folder` is gone before it listens.

    Raises:
        OSError: nothing can be made in the folder, or no descriptor is left.

    """

    def __init__(self, folder: str) -> None:
        with contextlib.ExitStack() as undo:
            self.socket = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self.socket.setblocking(False)
            inside = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # the path of a socket is short
            undo.callback(os.close, inside)
            name = f"/proc/self/fd/{inside}/.{secrets.token_hex(8)}"
            self.socket.bind(name)
            try:
                self._door = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            finally:
                os.unlink(name)
            self.socket.listen(BACKLOG)
            undo.pop_all()
            os.close(inside)
        self.path = f"/proc/self/fd/{self._door}"

    def close(self) -> None:
        """Listens no more, unless the socket has been given away."""
        self.socket.close()
        os.close(self._door)


class Relay:
    """Passes bytes between `outside`, of a peer, and `inside`, until one of them ends; then it closes both."""

    def __init__(self, outside: socket.socket, inside: socket.socket, on_end: "Callable[[Relay], None]") -> None:
        self._outside, self._inside = outside, inside
        self._on_end = on_end
        self._refuses = take_descriptors(outside, take=False)
        self._uid = credentials(outside).uid
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self.inbound = _Half(self._loop, outside, inside, self._receive, self.close)
        self.outbound = _Half(self._loop, inside, outside, lambda: inside.recv_into(_buffer), self.close)

    def _receive(self) -> int:
        if self._refuses:
            return self._outside.recv_into(_buffer)
        return receive_without_descriptors(self._outside, _buffer, self._uid)

    def close(self) -> None:
        """Ends both connections; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for half in (self.inbound, self.outbound):
            half.stop()
        self._inside.close()
        hang_up(self._outside)
        self._on_end(self)

    def finish(self, until: float) -> None:
        """Sends what libzmq has left, without the loop and until then at most, and closes."""
        poller = select.poll()
        poller.register(self._outside, select.POLLOUT)
        with contextlib.suppress(OSError):
            while self.outbound.step() and poller.poll(max(0.0, until - time.monotonic()) * 1000):
                pass
        self.close()


class _Half:
    """One direction of a relay. `receive` reads into the buffer; `end` is called when no more comes."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        source: socket.socket,
        target: socket.socket,
        receive: Callable[[], int],
        end: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._target = target
        self._receive = receive
        self._end = end
        self.bytes = 0
        """How many have come."""
        self._rest = b""
        """What came and is not sent; while there is some, no more is read."""
        self._watch = ReadWatch(source.fileno(), self._read)
        self._watch.start()

    def stop(self) -> None:
        """Passes on nothing more by itself."""
        self._watch.stop()
        self._loop.remove_writer(self._target.fileno())

    def step(self) -> bool:
        """Sends the rest, or reads once and sends; False at the end.

        Raises:
            OSError: one of the two connections is gone.

        """
        if not self._rest:
            try:
                size = self._receive()
            except BlockingIOError:
                return True
            except BadRequest:  # descriptors came along
                return False
            if not size:
                return False
            self.bytes += size
            sent = self._send(_buffer[:size])
            self._rest = bytes(_buffer[sent:size])
        else:
            self._rest = self._rest[self._send(self._rest) :]
        return True

    def _send(self, data: bytes | memoryview) -> int:
        try:
            return self._target.send(data)
        except BlockingIOError:
            return 0

    def _read(self) -> None:
        if not self._try():
            self._end()
        elif self._rest:
            self._watch.stop()
            self._loop.add_writer(self._target.fileno(), self._write)

    def _write(self) -> None:
        if not self._try():
            self._end()
        elif not self._rest:
            self._loop.remove_writer(self._target.fileno())
            self._watch.start()

    def _try(self) -> bool:
        try:
            return self.step()
        except OSError:
            return False


def finish(relays: Iterable[Relay], seconds: float) -> None:
    """Lets the relays send what is left, for so long together."""
    until = time.monotonic() + seconds
    for relay in list(relays):
        relay.finish(until)


_FIRST_PAUSE: Final = RECONNECT_MS / 1000
_LAST_PAUSE: Final = RECONNECT_MAX_MS / 1000


class Passage:
    """A DEALER that connects to `address` talks to whoever listens at `path`.

    It is tried again and again, after pauses that double until a connection lasts.

    Raises:
        OSError: no descriptor is left, or nothing can be made in `folder`.

    """

    def __init__(self, path: str, folder: str) -> None:
        self.trouble = ""
        """Why nobody is connected to at `path`; empty if somebody is, or nobody listens."""
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._inside: socket.socket | None = None
        """The DEALER's connection, while nobody is at the other end."""
        self._relay: Relay | None = None
        self._again: asyncio.TimerHandle | None = None
        self._pause = self._began = 0.0
        self._listener = PrivateListener(folder)
        self._watch()

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

    def _watch(self) -> None:
        if self._listener.socket.fileno() >= 0:
            self._loop.add_reader(self._listener.socket.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            inside, _ = self._listener.socket.accept()
        except OSError:  # it has gone, and comes again; or no descriptor is left
            self._loop.remove_reader(self._listener.socket.fileno())
            self._loop.call_later(ACCEPT_PAUSE_SECONDS, self._watch)
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
        try:
            outside = connect_to_peer(self._path)
        except (OSError, BadRequest, Unavailable) as error:
            self.trouble = "" if isinstance(error, OSError) else error.text
            self._try_in(max(self._pause, REFUSED_MS / 1000 if isinstance(error, BadRequest) else 0.0))
            return
        self.trouble = ""
        inside, self._inside = self._inside, None
        self._began = self._loop.time()
        self._relay = Relay(outside, inside, self._ended)

    def _ended(self, relay: Relay) -> None:
        self._relay = None
        # Whoever says a byte and hangs up is no peer that has come back: thousands of them would take the loop's time.
        if relay.inbound.bytes and self._loop.time() - self._began > _LAST_PAUSE:
            self._pause = 0.0
