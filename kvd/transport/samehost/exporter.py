"""Lends this daemon's pools to other daemons of its host, for reading, over a Unix socket.

A peer that shows a token gets the descriptors of the pools that the token covers, and of no others. A token covers
registrations that stood when it was drawn: a pool that is registered anew is another one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections import Counter, deque
from typing import Final

from msgspec import Struct

from kvd import foreign, limits
from kvd.errors import ErrorCode, KvdError, Unavailable, refusal
from kvd.net.interface import OPEN
from kvd.net.local.gate import Pace
from kvd.net.local.listener import Listener, hang_up
from kvd.net.local.reader import FrameReader
from kvd.net.lock import PathLock
from kvd.net.stream import Frame, FrameStream, pack
from kvd.net.unix import Party, created_with, party_at, take_descriptors
from kvd.protocol.codec import encode, import_requests
from kvd.protocol.export import Exported, ExportedPool, Import, ImportRefused, Withdrawn
from kvd.transport.interface import Region

_FRAME_BYTES: Final = 64
"""More than a request takes."""


_NO_DESCRIPTORS: Final = pack(
    encode(ImportRefused(ErrorCode.OVERLOADED, "that daemon has no descriptors left for peers; raise its LimitNOFILE"))
)


class _Export(Struct, frozen=True):
    """A registered pool; `descriptor` is ours."""

    message: ExportedPool
    descriptor: int


class Exporter:
    """Serves `path`, a socket of file mode `mode`.

    Raises:
        BadRequest: `BAD_CONFIG`, another daemon serves the path, or nothing can be bound there.

    """

    def __init__(self, path: str, mode: int) -> None:
        self._word = ctypes.create_string_buffer(os.urandom(8), 8)
        """Importers look for it in this process's memory."""
        self.lock = PathLock(path)
        self._exports: dict[int, _Export] = {}
        """By registration."""
        self._registrations: dict[int, int] = {}
        """The current one of each pool."""
        self._last = 0
        self._tokens: dict[bytes, frozenset[int]] = {}
        self._importers: set[_Importer] = set()
        self._asking: dict[int, dict[_Importer, None]] = {}
        """Those that have not shown a token, by user, the oldest first."""
        self._open: Counter[Party | int] = Counter()
        """How many connections there are, of each process and of each user."""
        self._unread: Counter[Party | int] = Counter()
        """Those that have not read what they asked for."""
        self._path = path
        try:
            with created_with(mode):
                self._listener = Listener(path, self._accepted, Pace(), _NO_DESCRIPTORS)
        except OSError as error:
            self.lock.release()
            raise refusal(ErrorCode.BAD_CONFIG, f"cannot listen on {path}: {error}") from error

    def add(self, pool: int, region: Region) -> None:
        """Exports a pool; its descriptor stays the caller's.

        Raises:
            OSError: it cannot be opened once more; nothing is exported.

        """
        # Of a GPU's memory there is no read-only descriptor.
        lent = os.dup(region.descriptor) if region.device else _read_only(region.descriptor)
        self._last += 1
        self._registrations[pool] = self._last
        message = ExportedPool(region.base.to_bytes(8, "little"), region.size, region.length, region.device)
        self._exports[self._last] = _Export(message, lent)

    def remove(self, pool: int) -> None:
        """Exports a pool no longer, and tells those who were sent it; nobody can make them unmap it."""
        registration = self._registrations.pop(pool, None)
        if registration is not None:
            export = self._exports.pop(registration)
            os.close(export.descriptor)
            for importer in [importer for importer in self._importers if registration in importer.lent]:
                importer.withdraw(registration, export.message)

    def token(self, pools: tuple[int, ...] | None = None) -> bytes:
        """A token for `pools`, or for all, as they are registered now; the same one while that does not change."""
        chosen = self._registrations.keys() if pools is None else self._registrations.keys() & set(pools)
        covered = frozenset(self._registrations[pool] for pool in chosen)
        for token, known in self._tokens.items():
            if known == covered:
                return token
        token = os.urandom(limits.SECRET_BYTES)
        self._tokens[token] = covered
        if len(self._tokens) > limits.MAX_TOKENS:
            del self._tokens[next(iter(self._tokens))]
        return token

    def close(self) -> None:
        """Hangs up on everybody and removes the socket."""
        self._listener.close()
        for importer in list(self._importers):
            importer.close()
        for export in self._exports.values():
            os.close(export.descriptor)
        self._exports.clear()
        self.lock.release(self._path)

    def _accepted(self, accepted: socket.socket) -> None:
        try:
            who = party_at(accepted)
        except OSError:  # the process has ended
            hang_up(accepted)
            return
        if not self._has_room(who):
            hang_up(accepted)
            return
        if sum(map(len, self._asking.values())) >= limits.MAX_IMPORTS_ASKING:
            of_busiest = max(self._asking.values(), key=len)
            next(iter(of_busiest)).close()
        importer = _Importer(accepted, who, self)
        self._importers.add(importer)
        self._asking.setdefault(who.uid, {})[importer] = None
        self._open.update((who, who.uid))

    def _has_room(self, who: Party) -> bool:
        own = self._open[who] if who.process else 0
        if foreign.waiting(who.uid) >= limits.MAX_CLOSING_PER_USER:
            return False
        within = own < limits.MAX_IMPORTS_PER_PROCESS and self._open[who.uid] < limits.MAX_IMPORTS_PER_USER
        return within and len(self._importers) < limits.MAX_PEERS

    def lend(self, importer: _Importer, token: bytes) -> list[int]:
        """The registrations that the holder of `token` is sent, who has asked now; it has `taken` them later.

        Raises:
            BadRequest: `NOT_PERMITTED`, there is no such token (any more).
            Unavailable: `OVERLOADED`, others of its user or its process do not read what they are sent.

        """
        covered = self._tokens.get(token)
        if covered is None:
            raise refusal(ErrorCode.NOT_PERMITTED, "the token covers no pool here; say hello again for a new one")
        who = importer.who
        for what, count, bound in (
            (f"user {who.uid}", self._unread[who.uid], limits.MAX_IMPORTS_UNREAD),
            ("this process", self._unread[who] if who.process else 0, limits.MAX_IMPORTS_UNREAD_PER_PROCESS),
        ):
            if count >= bound:
                text = f"{count} connections of {what} have not read the pools that they asked for; try again later"
                raise refusal(ErrorCode.OVERLOADED, text)
        self._asks_no_more(importer)
        self._unread.update((who, who.uid))
        return sorted(covered & self._exports.keys())

    def taken(self, importer: _Importer) -> None:
        """It has read what it asked for, or is gone."""
        self._unread -= Counter((importer.who, importer.who.uid))

    def left(self, importer: _Importer) -> None:
        """A connection is closed."""
        self._importers.remove(importer)
        self._asks_no_more(importer)
        self._open -= Counter((importer.who, importer.who.uid))

    def _asks_no_more(self, importer: _Importer) -> None:
        asking = self._asking.get(importer.who.uid, {})
        asking.pop(importer, None)
        if not asking:
            self._asking.pop(importer.who.uid, None)

    def frame_of(self, registration: int) -> tuple[bytes, int] | None:
        """The frame and the descriptor of a pool; None if it is exported no longer."""
        export = self._exports.get(registration)
        return None if export is None else (encode(export.message), export.descriptor)

    @property
    def end(self) -> bytes:
        """The frame that follows the last pool."""
        return encode(Exported(ctypes.addressof(self._word).to_bytes(8, "little"), self._word.raw))


class _Importer(FrameReader[Frame]):
    """A connection of another daemon: it asks once, takes one pool after the other, and stays.

    The next pool is sent when the last one has been read, and whoever does not read is not hung up on: what it has not
    read would stay on its way, and its place be free for more.
    """

    def __init__(self, accepted: socket.socket, who: Party, exporter: Exporter) -> None:
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least that there is: two frames like ours
        self.who = who
        owner = None if take_descriptors(accepted, take=False) else who.uid
        self._stream = FrameStream(accepted, _FRAME_BYTES, at_once=limits.MAX_SESSION_FRAMES, owner=owner)
        self._exporter = exporter
        self._served = False
        self._left: deque[int] = deque()
        """Registrations that it is yet to be sent."""
        self.lent: set[int] = set()
        """Those that it was sent, and that stand."""
        self._withdrawn: deque[bytes] = deque()
        """Frames about those that stand no more."""
        self._unread = False
        """Whether it has not read them all."""
        super().__init__(accepted.fileno(), OPEN)
        self._patience = self.loop.call_later(limits.IMPORT_SECONDS, self._unless_served)

    def receive(self) -> bool:
        """Reads once."""
        frames = self._stream.receive()
        self.frames.extend(frames or ())
        return frames is not None

    def deliver(self, frame: Frame) -> None:
        """Sends what the token covers; whoever asks twice, or for nothing that there is, is hung up on."""
        foreign.close(frame.descriptors)
        if self._served:
            self.close()
            return
        self._served = True
        try:
            request: Import = import_requests.decode(frame.content)
            self._left.extend(self._exporter.lend(self, request.token))
        except KvdError as error:
            self._refuse(error)
            return
        self._unread = True
        self.loop.add_writer(self._stream.fileno(), self._send_next)

    def _send_next(self) -> None:
        """Sends the next pool: the last one has been read, or its rest can be sent."""
        try:
            self._stream.flush()
            if self._stream.waiting:
                return
            if self._withdrawn:
                self._stream.send(self._withdrawn.popleft())
            elif self._left:
                registration = self._left.popleft()
                if (frame := self._exporter.frame_of(registration)) is not None:
                    self.lent.add(registration)
                    self._stream.send(frame[0], (frame[1],))
            elif self._unread:
                self._taken()
                self._stream.send(self._exporter.end)
            else:
                self.loop.remove_writer(self._stream.fileno())
        except Unavailable as error:
            self._refuse(error)
        except OSError:
            self.close()

    def withdraw(self, registration: int, pool: ExportedPool) -> None:
        """Asks it to unmap a pool that it was sent."""
        self.lent.remove(registration)
        self._withdrawn.append(encode(Withdrawn(pool.base)))
        self.loop.add_writer(self._stream.fileno(), self._send_next)
        self._send_next()

    def _taken(self) -> None:
        if self._unread:
            self._unread = False
            self._exporter.taken(self)

    def _refuse(self, error: KvdError) -> None:
        with contextlib.suppress(OSError):
            self._stream.send(encode(ImportRefused(error.code, error.text)))
        self.close()

    def lost(self, error: KvdError | None) -> None:  # noqa: ARG002
        """The peer has gone, or does not speak this protocol."""
        self.close()

    def close(self) -> None:
        """Hangs up; a second call does nothing."""
        if self._stream.fileno() >= 0:
            self._patience.cancel()
            self.stop()
            self.loop.remove_writer(self._stream.fileno())
            self._stream.close()
            while self.frames:  # before Linux 6.16 descriptors may have come with them
                foreign.close(self.frames.popleft().descriptors)
            self._taken()
            self._exporter.left(self)

    def _unless_served(self) -> None:
        if not self._served:
            self.close()


def _read_only(descriptor: int) -> int:
    """Another descriptor of the same memory, that cannot write to it.

    Pools have no file mode that lets another user open them again for writing (`kvd.memory.memfd`).
    """
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
