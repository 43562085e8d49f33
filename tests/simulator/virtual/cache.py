"""What the bytes of a simulated cache should be: known for every token of every sequence, and checked without a plan.

A sequence's content is a function of its name alone: one row of bytes a token and group, which holds both layers, K and
V and all heads. A rank holds the columns of its own heads, wherever its layout puts them.
"""

import functools
import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvd.client.events import Blocks
from kvd.layout import CacheSpec, Full, Group, Shard, Sliding
from kvd.layout.presets import LAYOUTS, Attention, Placement
from kvd.layout.view import Dim, View

LAYERS = 2
HEADS = 2
HEAD_BYTES = 2
ROW = LAYERS * 2 * HEADS * HEAD_BYTES
"""Bytes of one token in one group: layer, K or V, head, byte."""
_WINDOW = 5


class Cache:
    """A spec, and for each of its groups where every byte of every block lies.

    `offsets[g]` int64 [block, token, column] are offsets into the pool, `columns[g]` int64 [column] say which byte of
    the token's row each is.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.raw = spec.encode()
        self.offsets: list[NDArray[np.int64]] = []
        self.columns: list[NDArray[np.int64]] = []
        for group in spec.groups:
            offsets, columns = _places(group.views[0], spec.shard, group)
            self.offsets.append(offsets)
            self.columns.append(columns)

    def fill(self, data: NDArray[np.uint8], group: int, ids: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Writes `rows` uint8 [blocks * tokens, ROW] into the blocks `ids`."""
        tokens = self.spec.groups[group].block_tokens
        content = rows[:, self.columns[group]].reshape(len(ids), tokens, -1)
        data[self.offsets[group][list(ids)]] = content

    def check(self, data: NDArray[np.uint8], group: int, ids: Sequence[int], rows: NDArray[np.uint8]) -> bool:
        """Whether the first len(rows) tokens of the blocks `ids` hold `rows`."""
        content = data[self.offsets[group][list(ids)]].reshape(-1, len(self.columns[group]))
        return bool((content[: len(rows)] == rows[:, self.columns[group]]).all())

    def bytes_of(self, blocks: Sequence[Blocks]) -> NDArray[np.int64]:
        """Offsets of every byte of `blocks`."""
        parts = [self.offsets[part.group][list(part.ids)].ravel() for part in blocks if part.ids]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


def offsets(view: View, dim: Dim) -> list[int]:
    """Byte offset of each coordinate of `dim`, with the others 0; `[0]` if the view lacks it."""
    found = [0]
    for axis in view.axes:
        if axis.dim == dim:
            found = [base + i * axis.stride for base in found for i in range(axis.size)]
    return found


def _places(view: View, shard: Shard, group: Group) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    heads = shard.heads(view.heads)
    inner: list[tuple[int, int]] = [
        (
            layer_at + kv_at + head_at + byte,
            ((layer * 2 + kv) * HEADS + head) * HEAD_BYTES + byte,
        )
        for layer, layer_at in zip(view.layers, offsets(view, "layer"), strict=True)
        for kv, kv_at in enumerate(offsets(view, "kv"))
        for head, head_at in zip(heads, offsets(view, "head"), strict=True)
        for byte in range(HEAD_BYTES)
    ]
    blocks = np.array(offsets(view, "block"), np.int64)[:, None, None]
    tokens = np.array(offsets(view, "token"), np.int64)[None, :, None]
    places = np.array([at for at, _ in inner], np.int64)[None, None, :]
    assert blocks.shape[0] == group.num_blocks
    return view.offset + blocks + tokens + places, np.array([column for _, column in inner], np.int64)


@functools.cache
def make_cache(layout: str, tp_rank: int, tp_size: int, *, num_blocks: int, block_tokens: int, groups: int) -> Cache:
    """One rank's cache; `groups` is 1 (full attention) or 2 (and a sliding window)."""
    shard = Shard(stages=((0, LAYERS),), tp_rank=tp_rank, tp_size=tp_size)
    made: list[Group] = []
    offset = 0
    for index in range(groups):
        place = Placement(
            order=LAYOUTS[layout],
            shard=shard,
            layers=range(LAYERS),
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            offset=offset,
        )
        (view,) = Attention(HEADS, HEAD_BYTES).views(place)
        window = Full() if index == 0 else Sliding(window=_WINDOW)
        made.append(Group(window=window, block_tokens=block_tokens, num_blocks=num_blocks, views=(view,), arena=index))
        offset = view.end + 8  # a gap that belongs to nobody and must stay untouched
    return Cache(CacheSpec(dtype="fp8", pool_bytes=offset, groups=tuple(made), shard=shard))


@functools.lru_cache(4096)
def content(name: str, group: int, tokens: int) -> NDArray[np.uint8]:
    """The rows of a sequence in a group, uint8 [tokens, ROW]."""
    raw = hashlib.shake_128(f"{name}/{group}".encode()).digest(tokens * ROW)
    return np.frombuffer(raw, np.uint8).reshape(tokens, ROW)
