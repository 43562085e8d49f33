"""One engine: a model, and the paged cache of each of its tensor-parallel ranks.

The ranks of an engine share a process and its weights here. Each has its own pool, worker and KV heads, which only that
rank's attention reads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvd.engines.demo.model import Model, attention
from kvd.engines.demo.paged import PagedCache


class Engine:
    """Prefills and decodes, one sequence at a time, with KV in blocks that the caller allocates."""

    def __init__(self, model: Model, ranks: Sequence[PagedCache]) -> None:
        torch.set_num_threads(1)  # rounding depends on the threads of a product, and tokens are compared
        self._model = model
        self.ranks = ranks
        self._query_heads = model.config.query_heads // len(ranks)

    def prefill(self, prompt: Sequence[int], table: Sequence[int], first: int = 0) -> int:
        """Writes the KV of `prompt`, from position `first` on, into `table`'s blocks; returns the greedy next token."""
        return self._step(prompt, first, table)

    def decode(self, token: int, position: int, table: Sequence[int]) -> int:
        """The greedy token after `token` at `position`; writes its KV and reads that of all before it."""
        return self._step([token], position, table)

    def _step(self, tokens: Sequence[int], first: int, table: Sequence[int]) -> int:
        stop = first + len(tokens)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            attended = []
            for rank, cache in enumerate(self.ranks):
                heads = slice(cache.heads.start, cache.heads.stop)
                cache.write(layer, table, first, k[:, heads], v[:, heads])
                queries = q[:, rank * self._query_heads : (rank + 1) * self._query_heads]
                attended.append(attention(queries, *cache.read(layer, table, stop)))
            return torch.cat(attended, dim=1)

        logits = self._model.forward(torch.tensor(tokens), torch.arange(first, stop), attend)
        return int(logits.argmax())
