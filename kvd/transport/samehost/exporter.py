"""Lends this daemon's pools to other daemons of its host, for reading, over a Unix socket.

A peer that shows a token gets the descriptors of the pools that the token covers, and of no others. A token covers
registrations that stood when it was drawn: a pool that is registered anew is another one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections import Counter
from typing import Final

from msgspec import Struct

from kvd import limits
from kvd.errors import BadRequest, ErrorCode, KvdError
from kvd.net.frames import Frame, close_descriptors
from kvd.net.interface import OPEN
from kvd.net.local.listener import Listener
from kvd.net.local.reader import FrameReader
from kvd.net.lock import PathLock
from kvd.net.stream import FrameStream
from kvd.net.unix import Credentials, created_with, credentials
from kvd.protocol.codec import encode, import_requests
from kvd.protocol.export import Exported, ExportedPool, Import, ImportRefused, Withdrawn
from kvd.transport.interface import Region

_FRAME_BYTES: Final = 64
"""More than a request takes."""


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
        self._lock = PathLock(path)
        self._exports: dict[int, _Export] = {}
        """By registration."""
        self._registrations: dict[int, int] = {}
        """The current one of each pool."""
        self._last = 0
        self._tokens: dict[bytes, frozenset[int]] = {}
        self._importers: dict[_Importer, Credentials] = {}
        self._shares: Counter[Credentials] = Counter()
        self._path = path
        try:
            with created_with(mode):
                self._listener = Listener(path, self._accepted, OPEN)
        except OSError as error:
            self._lock.release()
            raise BadRequest(ErrorCode.BAD_CONFIG, f"cannot listen on {path}: {error}") from error

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
        self._lock.release(self._path)

    def _accepted(self, accepted: socket.socket) -> None:
        who = credentials(accepted)
        if len(self._importers) >= limits.MAX_PEERS or self._shares[who] >= limits.MAX_IMPORTS_PER_PROCESS:
            accepted.close()
            return
        self._shares[who] += 1
        self._importers[_Importer(accepted, self)] = who

    def left(self, importer: _Importer) -> None:
        """A connection is closed."""
        who = self._importers.pop(importer)
        self._shares -= Counter([who])

    def covered_by(self, token: bytes) -> set[int]:
        """The registrations that the holder of `token` may have.

        Raises:
            BadRequest: `NOT_PERMITTED`, there is no such token (any more).

        """
        covered = self._tokens.get(token)
        if covered is None:
            raise BadRequest(ErrorCode.NOT_PERMITTED, "the token covers no pool here; say hello again for a new one")
        return set(covered & self._exports.keys())

    def frames_for(self, registrations: set[int]) -> list[tuple[bytes, tuple[int, ...]]]:
        """What they are sent for these: frames, each with its descriptors."""
        exports = [self._exports[registration] for registration in sorted(registrations)]
        frames = [(encode(export.message), (export.descriptor,)) for export in exports]
        return [*frames, (encode(Exported(ctypes.addressof(self._word).to_bytes(8, "little"), self._word.raw)), ())]


class _Importer(FrameReader[Frame]):
    """A connection of another daemon: it asks once, and stays."""

    def __init__(self, accepted: socket.socket, exporter: Exporter) -> None:
        self._stream = FrameStream(accepted, _FRAME_BYTES)
        self._exporter = exporter
        self._served = False
        self.lent: set[int] = set()
        """Registrations that it was sent and that stand."""
        super().__init__(accepted.fileno(), OPEN)
        self._patience = self.loop.call_later(limits.IMPORT_SECONDS, self._unless_served)

    def receive(self) -> bool:
        """Reads once."""
        frames = self._stream.receive()
        self.frames.extend(frames or ())
        return frames is not None

    def deliver(self, frame: Frame) -> None:
        """Sends what the token covers; whoever asks twice, or for nothing that there is, is hung up on."""
        close_descriptors(frame.descriptors)
        if self._served:
            self.close()
            return
        self._served = True
        try:
            request: Import = import_requests.decode(frame.content)
            self.lent = self._exporter.covered_by(request.token)
        except KvdError as error:
            with contextlib.suppress(OSError):
                self._stream.send(encode(ImportRefused(error.code, error.text)))
            self.close()
            return
        self._send(self._exporter.frames_for(self.lent))

    def withdraw(self, registration: int, pool: ExportedPool) -> None:
        """Asks it to unmap a pool that it was sent."""
        self.lent.remove(registration)
        self._send([(encode(Withdrawn(pool.base)), ())])

    def _send(self, frames: list[tuple[bytes, tuple[int, ...]]]) -> None:
        with contextlib.suppress(OSError):  # the read side reports a broken connection
            for content, descriptors in frames:
                self._stream.send(content, descriptors)
        if self._stream.waiting:
            self.loop.add_writer(self._stream.fileno(), self._flush)

    def _flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()
        if not self._stream.waiting:
            self.loop.remove_writer(self._stream.fileno())

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
            self._exporter.left(self)

    def _unless_served(self) -> None:
        if not self._served:
            self.close()


def _read_only(descriptor: int) -> int:
    """Another descriptor of the same memory, that cannot write to it.

    Pools have no file mode that lets another user open them again for writing (`kvd.memory.memfd`).
    """
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
