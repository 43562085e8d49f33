"""What peers need to reach a NIXL agent: NIXL's own metadata, and where that agent's process has the pools mapped."""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvd import limits
from kvd.errors import BadRequest
from kvd.protocol.codec import Decoder

_MAGIC = b"nixlSerDes|Agent"

_Address = Annotated[int, Meta(ge=0)]


class Metadata(Struct, frozen=True, array_like=True):
    """`nixl` is NIXL's; `addresses` has, by a pool's address in the daemon, that in the process which serves it.

    `process` are random bytes that tell that process from the next one, whose agent has the same name.
    """

    nixl: Annotated[bytes, Meta(max_length=limits.MAX_METADATA_BYTES)]
    process: Annotated[bytes, Meta(min_length=8, max_length=8)]
    addresses: Annotated[dict[_Address, _Address], Meta(max_length=limits.MAX_POOLS)]


write = msgspec.msgpack.Encoder().encode
_decoder = Decoder[Metadata](Metadata)


def read(metadata: bytes) -> Metadata | None:
    """What a peer sent, taken apart; None if it is none."""
    try:
        return _decoder.decode(metadata)
    except BadRequest:
        return None


def agent_of(nixl: bytes) -> str | None:
    """The name of the agent that NIXL's metadata is about; None if it is not NIXL's.

    NIXL tells only after it has loaded the metadata, and by then a peer that claims another's name has changed that
    one's entry.
    """
    start = len(_MAGIC) + 8
    if not nixl.startswith(_MAGIC) or len(nixl) < start:
        return None
    (length,) = struct.unpack_from("<Q", nixl, len(_MAGIC))
    return nixl[start : start + min(length, len(nixl))].decode(errors="replace")
