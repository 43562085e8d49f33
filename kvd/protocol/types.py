"""The types that messages are made of: bounded, so that a decoder refuses what a handler would have to check."""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvd import limits

VERSION = 1
"""Version of the protocol, said in the first message on each socket. A peer that says another is refused."""

Name = Annotated[str, Meta(min_length=1, max_length=limits.MAX_NAME_BYTES, pattern=r"^[A-Za-z0-9._:@/-]+$(?!\n)")]
"""`$` alone lets a newline follow in Python's expressions."""
RequestId = Annotated[str, Meta(min_length=1, max_length=limits.MAX_REQUEST_ID_BYTES)]
Address = Annotated[str, Meta(min_length=1, max_length=512)]
Seconds = Annotated[float, Meta(ge=0.0, le=3600.0)]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Code = Annotated[str, Meta(max_length=64)]
Text = Annotated[str, Meta(max_length=2 * limits.MAX_ERROR_TEXT)]
TraceParent = Annotated[str, Meta(max_length=55, pattern=r"^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")]
"""The `traceparent` of W3C Trace Context: `00-<trace>-<span>-<flags>`."""
BlockIds = Annotated[bytes, Meta(max_length=4 * limits.MAX_BLOCKS_PER_REQUEST)]
"""Block ids as little-endian unsigned 32-bit integers, 4 bytes each (512 ids: 0.7 us to code, 19 as a list)."""


Secret = Annotated[bytes, Meta(min_length=limits.SECRET_BYTES, max_length=limits.SECRET_BYTES)]
"""Drawn for one offer, at random: who has it may read what was offered."""
Proof = Annotated[bytes, Meta(min_length=limits.SECRET_BYTES, max_length=limits.SECRET_BYTES)]
"""That who asks has the secret of an offer, and means its very blocks (`kvd.protocol.ticket.proof`)."""

_CONFIDENTIAL: Final = frozenset({"secret", "proof", "ticket"})
"""Fields that give the right to read: logs and tracebacks show that they are there, and not what they hold."""


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message: a msgpack array whose first element is its tag. Fields are only ever appended, with a default."""

    def __repr__(self) -> str:
        """As of any struct, without what gives the right to read."""
        shown = (
            f"{field}={'...' if field in _CONFIDENTIAL else repr(getattr(self, field))}"
            for field in self.__struct_fields__
        )
        return f"{type(self).__name__}({', '.join(shown)})"


class Span(Message, frozen=True):
    """Consecutive blocks of one KV-cache group: `ids[i]` holds position `first + i` of the sequence, in blocks."""

    group: Annotated[int, Meta(ge=0, lt=limits.MAX_GROUPS)]
    first: Annotated[int, Meta(ge=0, lt=1 << 32)]
    ids: BlockIds


Spans = Annotated[tuple[Span, ...], Meta(max_length=limits.MAX_GROUPS)]
