"""The cache that is measured: plain blocks, by default in one layer so that a block is one descriptor."""

import numpy as np
from numpy.typing import NDArray

from kvd.layout import CacheSpec, Full, Group, Shard, View, strided

_BLOCK_TOKENS = 16


def flat_spec(blocks: int, block_bytes: int, layers: int = 1, *, cross_layer: bool = False) -> CacheSpec:
    """A pool of `blocks` blocks of `block_bytes` bytes per layer (a multiple of 16), with no gaps.

    With `cross_layer`, all layers of a block lie together; otherwise all blocks of a layer do.
    """
    sizes = {"layer": layers, "block": blocks, "token": _BLOCK_TOKENS, "byte": block_bytes // _BLOCK_TOKENS}
    axes = strided("block layer token byte" if cross_layer else "layer block token byte", sizes)
    view = View(component="latent", offset=0, axes=axes, layers=tuple(range(layers)))
    group = Group(window=Full(), block_tokens=_BLOCK_TOKENS, num_blocks=blocks, views=(view,))
    shard = Shard(stages=((0, layers),))
    return CacheSpec(dtype="uint8", pool_bytes=view.end, groups=(group,), shard=shard)


def tokens_of(blocks: int) -> int:
    """Tokens that fill `blocks` blocks."""
    return blocks * _BLOCK_TOKENS


def pattern(blocks: int, block_bytes: int) -> NDArray[np.uint8]:
    """Contents of the producer's pool, uint8 [blocks, block_bytes]: no 8 bytes are repeated."""
    words = np.arange(blocks * block_bytes // 8, dtype=np.uint64)
    return (words * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8).reshape(blocks, block_bytes)
