"""How a worker names blocks."""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvd.errors import ErrorCode, refusal
from kvd.protocol.types import Span


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of one KV-cache group: `ids[i]` holds the sequence's block number `first + i`.

    `ids` are block ids in the worker's own pool: integers, or packed as little-endian unsigned 32-bit integers.
    """

    group: int
    first: int
    ids: Sequence[int] | bytes


def spans(blocks: Iterable[Blocks]) -> tuple[Span, ...]:
    """Encodes `blocks` for a message.

    Raises:
        BadRequest: `BAD_BLOCKS`, an id is not an unsigned 32-bit integer, or the bytes are not whole ids.

    """
    return tuple(Span(part.group, part.first, _packed(part)) for part in blocks)


def _packed(blocks: Blocks) -> bytes:
    if isinstance(blocks.ids, bytes):
        if len(blocks.ids) % 4:
            raise refusal(
                ErrorCode.BAD_BLOCKS, f"group {blocks.group}: {len(blocks.ids)} bytes of block ids are not whole u32s"
            )
        return blocks.ids
    try:
        return struct.pack(f"<{len(blocks.ids)}I", *blocks.ids)
    except (struct.error, TypeError) as error:
        raise refusal(ErrorCode.BAD_BLOCKS, f"group {blocks.group}: block ids must be u32s ({error})") from error
