"""Frames on a Unix stream: a little-endian u32 length, then that many bytes; descriptors travel beside the bytes.

The kernel delivers descriptors with the first byte of the `sendmsg` that carried them, and one read never goes past
that `sendmsg`. So descriptors that arrive with some bytes belong to the last frame that begins in them.
"""

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvd import foreign, limits
from kvd.errors import BadRequest, ErrorCode, refusal

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
    """Splits a stream into frames of at most `bound` bytes; owns each descriptor until its frame is complete."""

    def __init__(self, bound: int = limits.MAX_MESSAGE_BYTES) -> None:
        self._bound = bound
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
                descriptors than a frame may have. Drop the stream; every descriptor not returned before is closed.

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
