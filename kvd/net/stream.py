"""Frames over a non-blocking Unix stream socket; both ends of a session use it."""

import array
import os
import socket
from collections import deque
from typing import Final

from kvd import limits
from kvd.errors import BadRequest, ErrorCode
from kvd.net.frames import MAX_DESCRIPTORS, Frame, FrameSplitter, close_descriptors, pack

RECEIVE_BYTES: Final = 16 * 1024
"""Bytes per read. As many empty frames as fit take 18 times as much memory, for each session."""
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)


class FrameStream:
    """Frames over `sock`, which it owns from now on; received ones have at most `bound` bytes."""

    def __init__(self, sock: socket.socket, bound: int = limits.MAX_MESSAGE_BYTES) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._splitter = FrameSplitter(bound)
        self._outgoing: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._outgoing_bytes = 0

    def fileno(self) -> int:
        """The socket's descriptor, for a loop to watch; -1 once closed."""
        return self._socket.fileno()

    @property
    def waiting(self) -> int:
        """Bytes that the kernel has not taken yet: if there are any, `flush` when the socket is writable."""
        return self._outgoing_bytes

    @property
    def unfinished(self) -> int:
        """Bytes received of an incomplete frame."""
        return self._splitter.unfinished

    def send(self, content: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Sends a frame and duplicates of `descriptors`, as far as the kernel takes them now.

        Raises:
            BadRequest: `TOO_LARGE`, the frame is above the bound; nothing was sent.
            OSError: the connection is gone; what waited is dropped.

        """
        data = pack(content)
        self._outgoing.append((memoryview(data), tuple(os.dup(descriptor) for descriptor in descriptors)))
        self._outgoing_bytes += len(data)
        self.flush()

    def flush(self) -> None:
        """Sends what waits, as far as the kernel takes it now.

        Raises:
            OSError: the connection is gone; what waited is dropped.

        """
        while self._outgoing:
            data, descriptors = self._outgoing[0]
            try:
                sent = socket.send_fds(self._socket, [data], descriptors) if descriptors else self._socket.send(data)
            except BlockingIOError:
                return
            except OSError:
                self._drop_outgoing()
                raise
            close_descriptors(descriptors)
            self._outgoing_bytes -= sent
            if sent == len(data):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = (data[sent:], ())

    def receive(self) -> list[Frame] | None:
        """The frames that one read completes, perhaps none; None if the other end is gone.

        Raises:
            BadRequest: not a frame (`FrameSplitter.feed`); close the stream.

        """
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(RECEIVE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return []
        except OSError:
            return None
        descriptors = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
        if flags & socket.MSG_CTRUNC:
            close_descriptors(tuple(descriptors))
            raise BadRequest(ErrorCode.BAD_MESSAGE, f"more than {MAX_DESCRIPTORS} descriptors with one frame")
        if not data:
            return None
        return self._splitter.feed(data, descriptors)

    def close(self) -> None:
        """Closes the socket and every descriptor that is still here."""
        self._drop_outgoing()
        self._splitter.close()
        self._socket.close()

    def _drop_outgoing(self) -> None:
        for _data, descriptors in self._outgoing:
            close_descriptors(descriptors)
        self._outgoing.clear()
        self._outgoing_bytes = 0
