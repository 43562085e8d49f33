"""The types in messages, with bounds, so that decoders do the checking and handlers need not."""

from collections.abc import Iterable
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvd import limits
from kvd.errors import ErrorCode, refusal

VERSION = 1
"""Version of the protocol, in the first message on each socket. A peer with another one is refused."""

Name = Annotated[str, Meta(min_length=1, max_length=limits.MAX_NAME_BYTES, pattern=r"^[A-Za-z0-9._:@/-]+$(?!\n)")]
"""In Python's expressions `$` alone would allow a newline to follow."""
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
"""Random, drawn for one offer: whoever has it may read the offered blocks."""
Proof = Annotated[bytes, Meta(min_length=limits.SECRET_BYTES, max_length=limits.SECRET_BYTES)]
"""Shows that the sender knows an offer's secret and blocks (`kvd.protocol.ticket.proof`)."""

_CONFIDENTIAL: Final = frozenset({"secret", "proof", "ticket"})
"""Fields that give the right to read: logs and tracebacks show their names, not their values."""


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message: a msgpack array whose first element is its tag. Fields are only ever appended, with a default."""

    def __repr__(self) -> str:
        """Like any struct's, without confidential values."""
        shown = (
            f"{field}={'...' if field in _CONFIDENTIAL else repr(getattr(self, field))}"
            for field in self.__struct_fields__
        )
        return f"{type(self).__name__}({', '.join(shown)})"


class Span(Message, frozen=True):
    """Blocks of one KV-cache group: `ids[i]` holds the sequence's block number `first + i`."""

    group: Annotated[int, Meta(ge=0, lt=limits.MAX_GROUPS)]
    first: Annotated[int, Meta(ge=0, lt=1 << 32)]
    ids: BlockIds


Spans = Annotated[tuple[Span, ...], Meta(max_length=limits.MAX_GROUPS)]


def go_on(stops: dict[int, int], span: Span) -> None:
    """Notes a span in `stops`, the position behind the last block of each group.

    Raises:
        BadRequest: `BAD_BLOCKS`, it does not begin there.

    """
    group = span.group
    if stops.get(group, span.first) != span.first:
        text = f"blocks of group {group} are named from position {span.first} on; those before end at"
        raise refusal(ErrorCode.BAD_BLOCKS, f"{text} {stops[group]}, and the next ones begin there")
    stops[group] = span.first + len(span.ids) // 4


def joined(parts: Iterable[Spans]) -> Spans:
    """One span a group, in the order in which the groups first appear, from lists of spans that continue each other.

    Both sides of an offer that grows join what they have this way, so that their proofs are over the same list.

    Raises:
        BadRequest: `BAD_BLOCKS`, blocks of a group do not begin at the position behind those before them.

    """
    ids: dict[int, list[bytes]] = {}
    first: dict[int, int] = {}
    stops: dict[int, int] = {}
    for spans in parts:
        for span in spans:
            go_on(stops, span)
            first.setdefault(span.group, span.first)
            ids.setdefault(span.group, []).append(span.ids)
    return tuple(Span(group, first[group], b"".join(found)) for group, found in ids.items())
