"""Messages between a prefill and a decode engine about one request; SGLang calls what they share its room.

Each is one frame of msgpack, from one engine's control socket to the other's. `nonce` is drawn by the decode engine for
one attempt: a room's number may come again.
"""

from collections.abc import Callable
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kvd.limits import MAX_MESSAGE_BYTES
from kvd.protocol.codec import Decoder

Address: TypeAlias = tuple[str, int]
"""Host and port of an engine's control socket."""

Room: TypeAlias = Annotated[int, Meta(ge=0)]
Nonce: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Reason: TypeAlias = Annotated[str, Meta(max_length=4096)]


class _Message(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    room: Room
    nonce: Nonce


class Wanted(_Message, frozen=True, tag="wanted"):
    """The decode engine has pages for the request, but for its first `prefix` tokens; where to send the ticket."""

    prefix: Annotated[int, Meta(ge=0, lt=1 << 31)]
    host: Annotated[str, Meta(max_length=255)]
    port: Annotated[int, Meta(gt=0, lt=1 << 16)]
    grows: bool = False
    """Whether it takes the ticket of an offer that grows while the prompt is computed."""


class Offered(_Message, frozen=True, tag="offered"):
    """The prefill is done, or grows: here is its ticket."""

    ticket: Annotated[str, Meta(max_length=MAX_MESSAGE_BYTES)]
    prompt: Annotated[int, Meta(ge=0, lt=1 << 32)]
    """Its checksum (`kvd.engines.identity`)."""

    def __repr__(self) -> str:
        return f"Offered(room={self.room})"  # whoever has the ticket may read what it names


class Refused(_Message, frozen=True, tag="refused"):
    """The prefill engine will not offer the request, or no longer does."""

    reason: _Reason


class Abandoned(_Message, frozen=True, tag="abandoned"):
    """The decode engine does not want the request any more."""

    reason: _Reason


Message: TypeAlias = Wanted | Offered | Refused | Abandoned

encode = msgspec.msgpack.Encoder().encode
decode: Callable[[bytes], Message] = Decoder[Message](Message).decode
