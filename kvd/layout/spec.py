"""The spec: everything a worker declares of its pool, in a form that travels in attach and hello."""

from typing import Any

import msgspec

from kvd.errors import BadRequest, ErrorCode
from kvd.layout.check import check_spec
from kvd.layout.shard import Shard
from kvd.layout.view import View
from kvd.layout.window import Window
from kvd.limits import MAX_SPEC_BYTES


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share block tables: one list of block ids serves all of them.

    `block_tokens` is the number of tokens of a block, and block ids are below `num_blocks`. Groups that overlay one
    allocation have the same `arena` number: there, equal ids mean equal memory. A rank none of whose layers belong to
    the group declares it without views, because groups match by their index on both sides.
    """

    window: Window
    block_tokens: int
    num_blocks: int
    views: tuple[View, ...]
    arena: int = 0

    def needed(self, tokens: int) -> range:
        """Positions that must be present once `tokens` tokens are computed (see `kvd.layout.window`)."""
        return self.window.needed(tokens, self.block_tokens)

    @property
    def block_bytes(self) -> int:
        """Bytes that one block of this group holds on this rank, over all components and layers."""
        return sum(view.block_bytes for view in self.views)


class CacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The cache of one rank. Making one checks it: `BadRequest(BAD_SPEC)` names the field and its value.

    Every byte that a view can address lies in the pool of `pool_bytes`, no view overlaps itself, and arenas do not
    overlap each other. `dtype` is that of all views that give none.
    """

    dtype: str
    pool_bytes: int
    groups: tuple[Group, ...]
    shard: Shard

    def __post_init__(self) -> None:
        check_spec(self)

    def encode(self) -> bytes:
        """The spec as msgpack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, raw: bytes) -> "CacheSpec":
        """The spec that `raw` is the msgpack of.

        Raises:
            BadRequest: BAD_SPEC, naming the field and the value, for bytes that are not a sound spec.

        """
        return _decode(raw, _MSGPACK)

    @classmethod
    def decode_json(cls, raw: bytes) -> "CacheSpec":
        """As `decode`, from JSON: what people write into files."""
        return _decode(raw, _JSON)


_MSGPACK = msgspec.msgpack.Decoder(CacheSpec)
_JSON = msgspec.json.Decoder(CacheSpec)


def _decode(raw: bytes, decoder: Any) -> CacheSpec:
    if len(raw) > MAX_SPEC_BYTES:
        raise BadRequest(ErrorCode.BAD_SPEC, f"spec is {len(raw)} bytes, the limit is {MAX_SPEC_BYTES}")
    try:
        spec: CacheSpec = decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(ErrorCode.BAD_SPEC, f"spec: {error}") from error
    return spec
