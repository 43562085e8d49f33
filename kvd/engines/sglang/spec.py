"""The cache of an SGLang worker as a `CacheSpec`. Pure; `kvd.engines.sglang.memory` reads it from SGLang.

The pool has the KV buffers first, layer by layer, as SGLang would have allocated them. A page is a block. After them
come records, one for each transfer: what the decode side takes over beside the cache, such as the first token. They are
a group of their own, so that they are offered and pulled together with the pages, under one lease; it lies beside the
cache, as engines of other kinds have no records.
"""

from dataclasses import dataclass

from kvd.layout import Axis, CacheSpec, Full, Group, Shard, State, View
from kvd.limits import MAX_TRANSFER_RECORDS

PAGES, RECORDS = 0, 1
"""The groups, by their index."""

SEQUENCE_TOKENS = 1 << 31
"""Tokens of a block of records: a sequence has one record."""

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """The KV buffers of one worker. `halves` is 2 where K and V follow each other in a layer's buffer, else 1.

    `pages` counts the padding page, too. `cell_bytes` is one head of one token of one half. `heads` is what this rank
    holds of `total_heads`; 1 of 1 means that all ranks hold the same.
    """

    component: str
    layers: tuple[int, ...]
    halves: int
    pages: int
    page_tokens: int
    heads: int
    total_heads: int
    cell_bytes: int
    dtype: str
    record_bytes: int
    shard: Shard
    identity: tuple[tuple[str, str], ...] = ()

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's buffer."""
        return self.halves * self.pages * self.page_tokens * self.heads * self.cell_bytes

    @property
    def records_offset(self) -> int:
        """Where the records begin, in bytes from the pool's begin."""
        return -(-len(self.layers) * self.layer_bytes // _ALIGNMENT) * _ALIGNMENT

    def record(self, number: int) -> slice:
        """The bytes of a record."""
        offset = self.records_offset + number * self.record_bytes
        return slice(offset, offset + self.record_bytes)


def cache_spec(cache: Cache) -> CacheSpec:
    """The spec of the pool.

    Raises:
        BadRequest: `BAD_SPEC`, kvd cannot address a cache like this.

    """
    token = cache.heads * cache.cell_bytes
    page = cache.page_tokens * token
    kv = (Axis("kv", 2, cache.pages * page),) if cache.halves == 2 else ()
    pages = View(
        component=cache.component,
        offset=0,
        axes=(
            Axis("layer", len(cache.layers), cache.layer_bytes),
            *kv,
            Axis("block", cache.pages, page),
            Axis("token", cache.page_tokens, token),
            Axis("head", cache.heads, cache.cell_bytes),
            Axis("byte", cache.cell_bytes, 1),
        ),
        layers=cache.layers,
        heads=cache.total_heads,
        dtype=cache.dtype,
    )
    records = View(
        component="first token",
        offset=cache.records_offset,
        axes=(
            Axis("layer", 1, MAX_TRANSFER_RECORDS * cache.record_bytes),
            Axis("block", MAX_TRANSFER_RECORDS, cache.record_bytes),
            Axis("byte", cache.record_bytes, 1),
        ),
        layers=cache.layers[-1:],
        heads=1,
        dtype="bytes",
    )
    return CacheSpec(
        dtype=cache.dtype,
        pool_bytes=records.end,
        groups=(
            Group(window=Full(), block_tokens=cache.page_tokens, num_blocks=cache.pages, views=(pages,)),
            Group(
                window=State(),
                block_tokens=SEQUENCE_TOKENS,
                num_blocks=MAX_TRANSFER_RECORDS,
                views=(records,),
                arena=1,
                beside=True,
            ),
        ),
        shard=cache.shard,
        identity=cache.identity,
    )
