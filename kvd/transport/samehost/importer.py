"""Imports the pools of another daemon of this host: maps what its exporter lends, for reading only."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from typing import Final

from kvd import foreign, limits
from kvd.errors import ErrorCode, error_from_code, on_error, refusal
from kvd.net.stream import Frame, FrameStream, no_descriptor
from kvd.net.unix import credentials, readable
from kvd.protocol.address import POOLS, export_path, is_unix
from kvd.protocol.codec import encode, exports
from kvd.protocol.export import ExportAddress, Exported, ExportedPool, Import, ImportRefused, Withdrawn
from kvd.transport.samehost.copies import Memory
from kvd.transport.samehost.lent import MappedPool, MapPool
from kvd.transport.samehost.process_memory import ProcessMemory

_FRAME_BYTES: Final = 4 * limits.KIB
_PATIENCE: Final = struct.pack("ll", int(limits.IMPORT_SECONDS), 0)
"""A `timeval`. With Python's own timeout the kernel would not wait at all while others are queued to connect."""


class _Lent:
    """A pool of a peer; it is unmapped once it is withdrawn and no read uses it."""

    def __init__(self, mapped: MappedPool) -> None:
        self.mapped = mapped
        self.withdrawn = False
        self._users = 0

    def use(self, change: int) -> None:
        """One read more that uses it, or one less."""
        self._users += change
        self._unmap_unused()

    def withdraw(self) -> None:
        """It has ended, or the peer has; a second time changes nothing."""
        if not self.withdrawn:
            self.withdrawn = True
            self._unmap_unused()

    def _unmap_unused(self) -> None:
        if self.withdrawn and not self._users:
            self.mapped.close()


class ImportedPools:
    """The pools of one daemon as it exported them; made with one user.

    `process` is that daemon's memory, None if it cannot be read from here.
    """

    def __init__(self, stream: FrameStream) -> None:
        self._stream = stream
        self._lent: dict[int, _Lent] = {}
        """By the address of the pool in the exporting daemon's process."""
        self._files: set[tuple[int, int]] = set()
        """Device and inode of those in host memory."""
        self.process: ProcessMemory | None = None
        self.lost = ""
        """Why no read of them lands any more."""
        self._users = 1

    def fileno(self) -> int:
        """The connection's descriptor: it is readable when `hear` has something to do."""
        return self._stream.fileno()

    @property
    def device(self) -> str:
        """The UUID of the GPU that has them, empty for host memory: the pools of one daemon are on one device."""
        return next((lent.mapped.memory.device for lent in self._lent.values()), "")

    def find(self, base: int) -> Memory | None:
        """Where the pool is mapped whose address in the exporting daemon's process is `base`; None if it has none."""
        found = self._lent.get(base)
        return found.mapped.memory if found and not found.withdrawn else None

    def stamp(self, address: int) -> int:
        """The stamp at an address of the exporting daemon's process; 0 if it cannot be read."""
        return int.from_bytes(self._bytes(address, limits.STAMP_BYTES), "little")

    def _bytes(self, address: int, size: int) -> bytes:
        if self.process is not None:
            with contextlib.suppress(OSError):
                return self.process.read(address, size)
        return b""

    def hear(self) -> bool:
        """Unmaps the pools that the exporting daemon says have ended. False if it has ended itself, or hung up.

        Raises:
            BadRequest: it says what it should not.
            Unavailable: `OVERLOADED`, it passes descriptors, and none is left for them.

        """
        frames = self._stream.receive()
        if frames is None:
            return False
        try:
            for frame in frames:
                message = exports.decode(frame.content)
                if not isinstance(message, Withdrawn):
                    text = f"it sent {type(message).__name__} after all of its pools had come"
                    raise refusal(ErrorCode.BAD_MESSAGE, text)
                self.withdraw(message)
        finally:
            for frame in frames:
                foreign.close(frame.descriptors)
        return True

    def add(self, pool: ExportedPool, descriptor: int, map_pool: MapPool) -> None:
        """Maps a pool by `map_pool`; the descriptor stays the caller's.

        Raises:
            BadRequest: `BAD_POOL`, its address has come before, or its file, which one could lend until our address
                space is full; `TOO_LARGE`, there are more pools than a daemon has.
            KvdError: it cannot be mapped.

        """
        base = int.from_bytes(pool.base, "little")
        if base in self._lent:
            raise refusal(ErrorCode.BAD_POOL, f"two pools came with the address {base:#x}")
        if len(self._lent) >= limits.MAX_POOLS:
            raise refusal(ErrorCode.TOO_LARGE, f"more than {limits.MAX_POOLS} pools came")
        self._lent[base] = _Lent(map_pool(pool, descriptor))
        if pool.device:  # its descriptors are all of one device file
            return
        status = os.fstat(descriptor)
        file = status.st_dev, status.st_ino
        if file in self._files:
            raise refusal(ErrorCode.BAD_POOL, f"the pool at {base:#x} is of a file that another one came with")
        self._files.add(file)

    def withdraw(self, message: Withdrawn) -> None:
        """Unmaps a pool that has ended once no read uses it.

        Raises:
            BadRequest: `BAD_POOL`, it has not come, or has been withdrawn before.

        """
        base = int.from_bytes(message.base, "little")
        if self.find(base) is None:
            raise refusal(ErrorCode.BAD_POOL, f"a pool at {base:#x} is withdrawn that was not lent")
        self._lent[base].withdraw()

    def verify(self, exported: Exported) -> None:
        """Forgets the process if its memory may not be read, or is not where the exporter's is."""
        found = self._bytes(int.from_bytes(exported.word, "little"), len(exported.value))
        if self.process is not None and found != exported.value:
            self.process.close()
            self.process = None

    def use(self, base: int) -> None:
        """Keeps the pool with this address mapped, and the process known, until `release`."""
        self._users += 1
        self._lent[base].use(+1)

    def release(self, base: int) -> None:
        """Gives up one use."""
        self._lent[base].use(-1)
        self._give_up()

    def hang_up(self) -> None:
        """Closes the connection, gives up the first use, and unmaps what no read uses."""
        self._stream.close()
        for lent in self._lent.values():
            lent.withdraw()
        self._give_up()

    def _give_up(self) -> None:
        self._users -= 1
        if not self._users and self.process is not None:
            self.process.close()


def check_path(path: str, address: str) -> None:
    """Checks that a daemon at `address` may say that it lends its pools at `path`: nobody sends us to other sockets.

    Raises:
        BadRequest: `BAD_MESSAGE`, it is no path of an export socket, or does not lie beside the daemon's own socket.

    """
    spelt = path.startswith("/") and path.endswith(POOLS) and os.path.normpath(path) == path
    if not spelt or "\0" in path:  # the kernel reads a path up to a NUL
        text = f"it lends its pools at {path!r}, which is not the shortest spelling of a path that ends in {POOLS}"
        raise refusal(ErrorCode.BAD_MESSAGE, text)
    if is_unix(address) and path != (own := export_path(address, "")):
        text = f"it lends its pools at {path}, which is not beside its own socket ({own}): mount the daemons' sockets "
        raise refusal(ErrorCode.BAD_MESSAGE, f"{text}at one path")


def import_pools(address: ExportAddress, map_pool: MapPool) -> ImportedPools:
    """Imports what `address` leads to, each pool by `map_pool`. Waits for up to `limits.IMPORT_SECONDS` beside that.

    Raises:
        KvdError: the pools cannot be had; the text says why.

    """
    deadline = time.monotonic() + limits.IMPORT_SECONDS
    try:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise no_descriptor(error) from error
    try:
        _connect(connected, address.path, deadline)
    except OSError as error:
        connected.close()
        why = error.strerror or error
        text = f"{address.path} cannot be reached ({why}): mount the daemons' sockets at one path, open to both users"
        raise refusal(ErrorCode.TRANSPORT, text) from error
    uid = credentials(connected).uid
    stream = FrameStream(connected, _FRAME_BYTES, owner=uid)
    pools = ImportedPools(stream)
    try:
        with on_error(pools.hang_up):
            foreign.check(uid)
            with contextlib.suppress(OSError):  # without it stamps cannot be read, and proofs go by message
                pools.process = ProcessMemory(connected)
            stream.send(encode(Import(address.token)))
            while True:
                frames = _next_frames(stream, deadline)
                came = time.monotonic()
                if _complete(pools, frames, map_pool):
                    return pools
                deadline += time.monotonic() - came  # what mapping takes is not the exporter's delay
    except OSError as error:
        raise refusal(ErrorCode.TRANSPORT, f"{address.path}: the daemon hung up ({error})") from error


def _connect(connected: socket.socket, path: str, deadline: float) -> None:
    """Waits until the exporter has room for one more that waits for it. Raises OSError."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _PATIENCE)
    while True:
        connected.connect(path)
        try:
            connected.getpeername()
        except OSError:  # the wait was interrupted, as by SIGSTOP and SIGCONT: Python takes that for a connection
            if time.monotonic() >= deadline:
                raise
        else:
            return


def _next_frames(stream: FrameStream, deadline: float) -> list[Frame]:
    left = deadline - time.monotonic()
    if left <= 0 or not readable(stream.fileno(), left):
        raise refusal(ErrorCode.TRANSPORT, f"its pools did not come within {limits.IMPORT_SECONDS:g} s")
    frames = stream.receive()
    if frames is None:
        raise refusal(ErrorCode.TRANSPORT, "it hung up before all of its pools had come")
    return frames


def _complete(pools: ImportedPools, frames: list[Frame], map_pool: MapPool) -> bool:
    """Adds the pools that have come; whether those were all."""
    complete = False
    try:
        for frame in frames:
            message = exports.decode(frame.content)
            if isinstance(message, ImportRefused):
                raise error_from_code(message.code, message.text)
            if isinstance(message, ExportedPool):
                if len(frame.descriptors) != 1:
                    raise refusal(ErrorCode.BAD_MESSAGE, f"a pool with {len(frame.descriptors)} descriptors")
                pools.add(message, frame.descriptors[0], map_pool)
            elif isinstance(message, Withdrawn):
                pools.withdraw(message)
            else:
                pools.verify(message)
                complete = True
    finally:
        for frame in frames:
            foreign.close(frame.descriptors)
    return complete
