"""Frames over a non-blocking Unix stream socket; both ends of a session use it.

A frame is a little-endian u32 length, then that many bytes; descriptors travel beside the bytes. The kernel delivers
descriptors with the first byte of the `sendmsg` that carried them, and one read never goes past that `sendmsg`. So
descriptors that arrive with some bytes belong to the last frame that begins in them.
"""

import array
import contextlib
import errno
import os
import resource
import socket
import struct
import sys
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvd import foreign, limits
from kvd.errors import BadRequest, ErrorCode, KvdError, refusal
from kvd.net.unix import MAX_PASSED

HEADER: Final = struct.Struct("<I")
MAX_DESCRIPTORS: Final = 4
"""Descriptors with one frame: a pool has one, device memory may need a few."""


class Frame(NamedTuple):
    """One frame, and the descriptors that came with it, which its receiver closes."""

    content: bytes
    descriptors: tuple[int, ...]


def pack(content: bytes) -> bytes:
    """Puts the header before `content`.

    Raises:
        BadRequest: `TOO_LARGE`, it is above the bound on a message.

    """
    if len(content) > limits.MAX_MESSAGE_BYTES:
        raise refusal(ErrorCode.TOO_LARGE, f"frame of {len(content)} bytes, the bound is {limits.MAX_MESSAGE_BYTES}")
    return HEADER.pack(len(content)) + content


class FrameSplitter:
    """Splits a stream into frames of at most `bound` bytes; owns each descriptor until its frame is complete.

    More than `at_once` frames that come together are refused: decoding thousands would take others' time.
    """

    def __init__(self, bound: int = limits.MAX_MESSAGE_BYTES, at_once: int = sys.maxsize) -> None:
        self._bound = bound
        self._at_once = at_once
        self._bytes = bytearray()
        self._descriptors: tuple[int, ...] = ()

    @property
    def unfinished(self) -> int:
        """Bytes of the incomplete frame."""
        return len(self._bytes)

    def feed(self, data: bytes, descriptors: Sequence[int] = ()) -> list[Frame]:
        """The frames that `data` completes.

        Raises:
            BadRequest: `TOO_LARGE`, a length above the bound (as random bytes usually are); `BAD_MESSAGE`, more
                descriptors than a frame may have, or more frames than may come at once. Drop the stream; every
                descriptor not returned before is closed.

        """
        arrived = tuple(descriptors)
        frames: list[Frame] = []
        self._bytes += data
        try:
            while (content := self._next()) is not None:
                # The new descriptors belong to a later frame if one has begun.
                if arrived and not self._bytes:
                    self._keep(arrived)
                    arrived = ()
                frames.append(Frame(content, self._descriptors))
                self._descriptors = ()
                if len(frames) > self._at_once:
                    text = f"more than {self._at_once} frames at once; wait for the answers"
                    raise refusal(ErrorCode.BAD_MESSAGE, text)
            self._keep(arrived)
        except BadRequest:
            foreign.close(descriptor for descriptor in arrived if descriptor not in self._descriptors)
            for frame in frames:
                foreign.close(frame.descriptors)
            self.close()
            raise
        return frames

    def close(self) -> None:
        """Closes the descriptors of the incomplete frame."""
        foreign.close(self._descriptors)
        self._descriptors = ()
        self._bytes.clear()

    def _next(self) -> bytes | None:
        if len(self._bytes) < HEADER.size:
            return None
        (length,) = HEADER.unpack_from(self._bytes)
        if length > self._bound:
            raise refusal(ErrorCode.TOO_LARGE, f"a frame announces {length} bytes, the bound is {self._bound}")
        end = HEADER.size + length
        if len(self._bytes) < end:
            return None
        content = bytes(self._bytes[HEADER.size : end])
        del self._bytes[:end]
        return content

    def _keep(self, descriptors: tuple[int, ...]) -> None:
        self._descriptors += descriptors
        if len(self._descriptors) > MAX_DESCRIPTORS:
            raise refusal(
                ErrorCode.BAD_MESSAGE,
                f"{len(self._descriptors)} descriptors with one frame, {MAX_DESCRIPTORS} is the bound",
            )


RECEIVE_BYTES: Final = 16 * 1024
"""Bytes per read. As many empty frames as fit take 18 times as much memory, for each session."""
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(MAX_PASSED * array.array("i").itemsize)
"""For all that the kernel passes: it would close what it does not deliver, here and now."""

_NONE_LEFT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS})
"""Why a descriptor cannot be passed although the connection is well."""


class FrameStream:
    """Frames over `sock`, which it owns from now on; received ones have at most `bound` bytes, `at_once` in one read.

    `owner` is the user at the other end, if it may pass descriptors: those, and the socket, which may hold some, are
    closed by `kvd.foreign`. A `patient` one has what it sends with descriptors wait until the other end takes any.
    """

    def __init__(
        self,
        sock: socket.socket,
        bound: int = limits.MAX_MESSAGE_BYTES,
        *,
        at_once: int = sys.maxsize,
        owner: int | None = None,
        patient: bool = False,
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._owner = owner
        self._patient = patient
        self._splitter = FrameSplitter(bound, at_once)
        self._outgoing: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._outgoing_bytes = 0
        self.sent = 0
        """Bytes that the kernel has taken, since the beginning."""

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
            Unavailable: `OVERLOADED`, no descriptor is left, or none can be passed; what waited is dropped.
            OSError: the connection is gone; what waited is dropped.

        """
        data = pack(content)
        copies: tuple[int, ...] = ()
        try:
            for descriptor in descriptors:
                copies += (os.dup(descriptor),)
        except OSError as error:
            foreign.close(copies)
            self._drop_outgoing()
            raise no_descriptor(error) from error
        self._outgoing.append((memoryview(data), copies))
        self._outgoing_bytes += len(data)
        self.flush()

    def flush(self) -> None:
        """Sends what waits, as far as the kernel takes it now.

        Raises:
            Unavailable: `OVERLOADED`, no descriptor can be passed; what waited is dropped.
            OSError: the connection is gone; what waited is dropped.

        """
        while self._outgoing:
            data, descriptors = self._outgoing[0]
            try:
                sent = socket.send_fds(self._socket, [data], descriptors) if descriptors else self._socket.send(data)
            except BlockingIOError:
                return
            except OSError as error:
                if self._patient and isinstance(error, PermissionError):
                    return
                self._drop_outgoing()
                if error.errno in _NONE_LEFT:
                    raise no_descriptor(error) from error
                raise
            foreign.close(descriptors)
            self._outgoing_bytes -= sent
            self.sent += sent
            if sent == len(data):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = (data[sent:], ())

    def receive(self) -> list[Frame] | None:
        """The frames that one read completes, perhaps none; None if the other end is gone.

        Raises:
            BadRequest: not a frame (`FrameSplitter.feed`); close the stream.
            Unavailable: `OVERLOADED`, no descriptor is left for what was passed; close the stream.

        """
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(RECEIVE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return []
        except OSError:
            return None
        descriptors = _descriptors_in(ancillary)
        if self._owner is not None:
            foreign.received(self._owner, descriptors)
        if flags & socket.MSG_CTRUNC:
            foreign.close(descriptors)
            raise no_descriptor(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        if len(descriptors) > MAX_DESCRIPTORS:
            foreign.close(descriptors)
            raise refusal(ErrorCode.BAD_MESSAGE, f"more than {MAX_DESCRIPTORS} descriptors with one frame")
        if not data:
            return None
        return self._splitter.feed(data, descriptors)

    def close(self) -> None:
        """Closes the socket and every descriptor that is still here."""
        self._drop_outgoing()
        self._splitter.close()
        if self._owner is None or self._socket.fileno() < 0:
            self._socket.close()
            return
        with contextlib.suppress(OSError):  # the other end has gone
            self._socket.shutdown(socket.SHUT_RDWR)
        foreign.close_of(self._owner, self._socket.detach())

    def _drop_outgoing(self) -> None:
        for _data, descriptors in self._outgoing:
            foreign.close(descriptors)
        self._outgoing.clear()
        self._outgoing_bytes = 0


def no_descriptor(error: OSError) -> KvdError:
    """The error for want of descriptors, with the kernel's name for it and the limit."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{error.strerror}: of this process, or on their way from its user's; at most {most} may be (LimitNOFILE)"
    return refusal(ErrorCode.OVERLOADED, text)


def receive_without_descriptors(connected: socket.socket, buffer: memoryview, uid: int) -> int:
    """Reads from a process of user `uid` where the kernel refuses no descriptors; the number of bytes.

    Raises:
        BadRequest: `BAD_MESSAGE`, descriptors came along, which are closed by `kvd.foreign`.
        OSError: nothing can be read.

    """
    size, ancillary, _, _ = connected.recvmsg_into([buffer], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    if ancillary:
        foreign.close_of(uid, *_descriptors_in(ancillary))
        raise refusal(ErrorCode.BAD_MESSAGE, "descriptors came along; this socket takes none")
    return size


def _descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> "array.array[int]":
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return descriptors
