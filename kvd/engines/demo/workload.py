"""The demo's prompts, and the single engine that computes the right tokens."""

import torch

from kvd.engines.demo.engine import Engine
from kvd.engines.demo.model import Model, ModelConfig
from kvd.engines.demo.paged import PagedCache
from kvd.engines.demo.spec import cache_spec

LONGEST_RANDOM = 640
LEAST_CAPACITY = 4096
"""Tokens. A pool of 4096 tokens is 128 MiB, and cannot hold all prompts of a longer run at once."""


def make_prompts(count: int, block_tokens: int, vocab: int, seed: int) -> list[list[int]]:
    """`count` prompts of random tokens.

    The first lengths are the error-prone ones: one token, less than a block of `block_tokens`, exactly
    one and exactly several blocks, and one token on either side of a boundary. The others are random.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = [4 * block_tokens, 1, max(1, block_tokens // 2), block_tokens, 2 * block_tokens - 1, block_tokens + 1]
    more = max(0, count - len(lengths))
    lengths += torch.randint(1, LONGEST_RANDOM + 1, (more,), generator=generator).tolist()
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths[:count]]


def pool_tokens(longest_prompt: int, generated: int, *block_tokens: int) -> int:
    """The capacity of a pool: at least two of the longest sequences, in whole blocks of every size."""
    step = max(block_tokens)
    return -(-max(LEAST_CAPACITY, 2 * (longest_prompt + generated + step)) // step) * step


class SingleEngine:
    """The same engine without kvd: prefill and decode in one process, in its own memory."""

    BLOCK_TOKENS = 16

    def __init__(self, config: ModelConfig, tokens: int) -> None:
        """Room for a sequence of `tokens` tokens."""
        self._table = list(range(-(-tokens // self.BLOCK_TOKENS)))
        spec = cache_spec(
            config,
            "flash-hnd",
            tp_rank=0,
            tp_size=1,
            block_tokens=self.BLOCK_TOKENS,
            num_blocks=len(self._table),
        )
        cache = PagedCache(memoryview(bytearray(spec.pool_bytes)), spec)
        self._engine = Engine(Model(config), [cache])

    def generate(self, prompt: list[int], count: int) -> list[int]:
        """`count` greedy tokens after `prompt`."""
        tokens = [self._engine.prefill(prompt, self._table)]
        while len(tokens) < count:
            tokens.append(self._engine.decode(tokens[-1], len(prompt) + len(tokens) - 1, self._table))
        return tokens
