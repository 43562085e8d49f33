"""Engines over plain buffers, and the slow way to move blocks between them."""

from dataclasses import dataclass

import torch

from kvd.engines.demo.engine import Engine
from kvd.engines.demo.model import Model, attention
from kvd.engines.demo.paged import BlockManager, PagedCache
from kvd.engines.demo.spec import cache_spec


@dataclass
class Side:
    engine: Engine
    blocks: BlockManager
    ranks: list[PagedCache]
    pools: list[bytearray]


def make_side(model: Model, *, layout="flash-hnd", tp=1, block_tokens=16, capacity=256) -> Side:
    num_blocks = capacity // block_tokens
    ranks, pools = [], []
    for rank in range(tp):
        spec = cache_spec(
            model.config, layout, tp_rank=rank, tp_size=tp, block_tokens=block_tokens, num_blocks=num_blocks
        )
        pool = bytearray(b"\xff") * spec.pool_bytes  # every float a NaN: what was not written cannot be read unseen
        pools.append(pool)
        ranks.append(PagedCache(memoryview(pool), spec))
    return Side(Engine(model, ranks), BlockManager(num_blocks, block_tokens), ranks, pools)


def copy_tokens(source: Side, source_table: list[int], target: Side, target_table: list[int], tokens: int) -> None:
    """Token by token and head by head: each of the target's ranks from any source rank that holds the head."""
    for rank in target.ranks:
        for head in rank.heads:
            owner = next(other for other in source.ranks if head in other.heads)
            for layer, caches in rank.layers.items():
                for kv, cache in enumerate(caches):
                    origin = owner.layers[layer][kv]
                    for token in range(tokens):
                        there, there_slot = divmod(token, owner.block_tokens)
                        here, here_slot = divmod(token, rank.block_tokens)
                        cache[target_table[here], head - rank.heads.start, here_slot] = origin[
                            source_table[there], head - owner.heads.start, there_slot
                        ]


def generate_by_recomputation(model: Model, prompt: list[int], count: int) -> list[int]:
    """`count` greedy tokens after `prompt`, each by a pass over the whole sequence: no cache, nothing to go wrong."""
    sequence = list(prompt)
    for _ in range(count):
        logits = model.forward(
            torch.tensor(sequence), torch.arange(len(sequence)), lambda _layer, q, k, v: attention(q, k, v)
        )
        sequence.append(int(logits.argmax()))
    return sequence[len(prompt) :]
