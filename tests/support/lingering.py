"""Files whose last close waits: a TCP socket that lingers, and one in a file system that does not answer."""

import contextlib
import ctypes
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

SECONDS = 600
"""How long such a socket lingers unless its peer goes."""


@contextlib.contextmanager
def lingering_socket() -> Iterator[int]:
    """A socket with SO_LINGER and unread data, for the block to close: then it lingers until the block ends."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.listen(1)
        ours = socket.socket()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, SECONDS))
        ours.connect(listener.getsockname())
        theirs, _ = listener.accept()
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                ours.send(bytes(1 << 16))
        try:
            yield ours.detach()
        finally:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            theirs.close()


_HEADER = struct.Struct("=IIQQIIII")
"""`fuse_in_header`: length, operation, request, node, user, group, process."""
_LOOKUP, _OPEN, _INIT, _FLUSH, _RELEASE = 1, 14, 26, 25, 18
_FORGETS = (2, 42)
_FILE = 2
_MODE = 0o100600


class DeafFileSystem:
    """A file in FUSE, `descriptor`, whose server answers until it is open, and nothing then. Takes root."""

    def __init__(self, folder: Path) -> None:
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        self._folder = folder
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0".encode()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"kvd-test", os.fsencode(folder), b"fuse", 0, options):
            os.close(self._device)
            pytest.skip(f"no FUSE here: {os.strerror(ctypes.get_errno())}")
        self._umount = lambda: libc.umount2(os.fsencode(folder), 2)  # MNT_DETACH
        self._server = threading.Thread(target=self._serve)
        self._server.start()
        self.descriptor = os.open(folder / "file", os.O_RDWR)
        self._server.join()

    def close(self) -> None:
        """Ends the server, and with it whatever waits for it."""
        os.close(self._device)
        self._umount()

    def _serve(self) -> None:
        operation = 0
        while operation != _OPEN:
            request = os.read(self._device, 1 << 18)
            _, operation, number, *_ = _HEADER.unpack_from(request)
            if operation == _INIT:
                self._answer(number, struct.pack("=IIIIHHIIHHI28x", 7, 31, 0, 0, 0, 0, 1 << 16, 1, 0, 0, 0))
            elif operation == _LOOKUP:
                attributes = struct.pack("=QQQQQQIIIIIIIIII", _FILE, 0, 0, 0, 0, 0, 0, 0, 0, _MODE, 1, 0, 0, 0, 4096, 0)
                self._answer(number, struct.pack("=QQQQII", _FILE, 0, 0, 0, 0, 0) + attributes)
            elif operation == _OPEN:
                self._answer(number, struct.pack("=QII", 1, 0, 0))
            elif operation not in _FORGETS:
                self._answer(number, b"", -38)

    def _answer(self, number: int, content: bytes, error: int = 0) -> None:
        os.write(self._device, struct.pack("=IiQ", 16 + len(content), error, number) + content)
