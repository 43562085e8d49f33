"""The paged KV cache of one rank, and which request holds which of its blocks.

The cache is torch views over a pool, shaped by the strides that the worker declared to kvd. All ranks of an engine
share one table of block ids.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from kvd.layout import CacheSpec, View

_DIMENSIONS = ("layer", "kv", "block", "head", "token", "byte")


def view_tensor(pool: memoryview, view: View, dtype: torch.dtype) -> Tensor:
    """`view` as a tensor [layers, kv, blocks, heads, tokens, dim] over the bytes of `pool`, without a copy.

    The pool cannot be unmapped while the tensor, or one made of it, is alive.
    """
    axes = {axis.dim: axis for axis in view.axes}
    sizes = [axes[dim].size if dim in axes else 1 for dim in _DIMENSIONS]
    strides = [axes[dim].stride if dim in axes else 0 for dim in _DIMENSIONS]
    item = dtype.itemsize
    sizes[-1] //= item
    elements = torch.frombuffer(pool, dtype=dtype, count=len(pool) // item)
    return elements.as_strided(sizes, [*(stride // item for stride in strides[:-1]), 1], view.offset // item)


class PagedCache:
    """K and V of the heads that one rank holds, read and written through block tables.

    A block table is the list of block ids of one sequence: token `i` lies in block `table[i // block_tokens]`.
    """

    def __init__(self, pool: memoryview, spec: CacheSpec) -> None:
        """`pool` is writable and holds `spec.pool_bytes` bytes or more; the first group of `spec` is K and V."""
        group = spec.groups[0]
        dtype: torch.dtype = getattr(torch, spec.dtype)
        self.block_tokens = group.block_tokens
        self.heads = spec.shard.heads(group.views[0].heads)
        """The global KV heads of this rank."""
        self.token_bytes = group.block_bytes // group.block_tokens
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        """K and V of each layer, each [blocks, heads, tokens, dim]."""
        for view in group.views:
            tensor = view_tensor(pool[: spec.pool_bytes], view, dtype)
            for index, layer in enumerate(view.layers):
                self.layers[layer] = (tensor[index, 0], tensor[index, 1])

    def write(self, layer: int, table: Sequence[int], first: int, k: Tensor, v: Tensor) -> None:
        """Stores `k` and `v`, each [tokens, heads, dim], of the tokens from position `first` on."""
        positions = torch.arange(first, first + len(k))
        blocks = torch.tensor(table)[positions // self.block_tokens]
        slots = positions % self.block_tokens
        keys, values = self.layers[layer]
        keys[blocks, :, slots] = k
        values[blocks, :, slots] = v

    def read(self, layer: int, table: Sequence[int], tokens: int) -> tuple[Tensor, Tensor]:
        """K and V, each [tokens, heads, dim], of the first `tokens` tokens."""
        blocks = torch.tensor(table[: -(-tokens // self.block_tokens)])
        keys, values = self.layers[layer]
        return self._gather(keys, blocks, tokens), self._gather(values, blocks, tokens)

    @staticmethod
    def _gather(cache: Tensor, blocks: Tensor, tokens: int) -> Tensor:
        return cache[blocks].transpose(1, 2).flatten(0, 1)[:tokens].contiguous()


class BlockManager:
    """Allocates blocks to requests."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._free = deque(range(num_blocks))
        self._tables: dict[str, list[int]] = {}

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def can_allocate(self, tokens: int) -> bool:
        """Whether there are free blocks for `tokens` tokens."""
        return self.blocks_for(tokens) <= len(self._free)

    def allocate(self, request: str, tokens: int) -> list[int]:
        """The block table of a new request, with room for `tokens` tokens; call `can_allocate` first."""
        if request in self._tables:
            raise ValueError(f"request {request!r} holds blocks already")
        if not self.can_allocate(tokens):
            raise ValueError(f"{request!r} needs {self.blocks_for(tokens)} blocks, {len(self._free)} are free")
        table = [self._free.popleft() for _ in range(self.blocks_for(tokens))]
        self._tables[request] = table
        return table

    def free(self, request: str) -> None:
        """Frees the blocks of a request."""
        self._free.extend(self._tables.pop(request))
