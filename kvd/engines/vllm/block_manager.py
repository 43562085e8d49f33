"""VLLM's block manager, and how many blocks it may lack for a request."""

from collections.abc import Callable
from typing import Any

_KEPT_FREE = 1 / 32
"""The share of its blocks that vLLM is taken to keep free of requests that begin, unless its `--watermark` is more."""


class BlockManager:
    """Around vLLM's `KVCacheManager`."""

    def __init__(self) -> None:
        self._manager: Any = None
        self._step_tokens = 0
        self._lookahead = 0

    def bind(self, manager: Any, step_tokens: int, lookahead: int, refused: Callable[[], None]) -> None:
        """Takes the `KVCacheManager`, before any request comes; calls `refused` when it lacks blocks for one.

        A step of vLLM's computes at most `step_tokens` tokens, and a drafter needs blocks for `lookahead` more.
        """
        allocate = manager.allocate_slots

        def allocate_slots(*args: Any, **options: Any) -> Any:
            blocks = allocate(*args, **options)
            if blocks is None:
                refused()
            return blocks

        # vLLM tells connectors of the blocks it has given, never of those it lacks.
        manager.allocate_slots = allocate_slots
        self._manager = manager
        self._step_tokens = step_tokens
        self._lookahead = lookahead

    @property
    def pool(self) -> Any:
        """Its `BlockPool`."""
        return self._manager.block_pool

    def blocks(self, request: str) -> list[Any]:
        """Its `KVCacheBlock`s of all groups, null blocks included."""
        return [block for group in self._manager.get_blocks(request).blocks for block in group]

    def free(self, request: Any) -> None:
        """Takes a request's blocks from it. May be done again."""
        self._manager.free(request)

    def shortage(self, request: Any) -> int:
        """How many blocks vLLM may lack to compute `request`, not above 0 if it has enough.

        `KVCacheManager.allocate_slots` counts twice, and gives blocks only if both counts are free. What the prefix
        cache has of a request that has no blocks is not known here.
        """
        # First for all its tokens, of a window as many blocks as that can hold at a time. Null blocks, which a load
        # leaves where a window has passed, are counted as if they were such blocks. So what the window needs next is
        # in the second count alone: the tokens of the next step, with the drafter's.
        whole = self._counted(request, request.num_tokens, capped=True)
        step = min(request.num_tokens, request.num_computed_tokens + self._step_tokens)
        needed = max(whole, self._counted(request, step, self._lookahead, capped=False))
        kept_free = max(_KEPT_FREE * self.pool.num_gpu_blocks, self._manager.watermark_blocks)
        return int(needed + kept_free - self.pool.get_num_free_blocks())

    def _counted(self, request: Any, tokens: int, lookahead: int = 0, *, capped: bool) -> int:
        """How many blocks vLLM counts that `request` lacks for its first `tokens` tokens."""
        count = self._manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=tokens + lookahead,
            new_computed_blocks=self._manager.empty_kv_cache_blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=request.num_computed_tokens,
            num_local_computed_tokens=request.num_computed_tokens,
            num_tokens_main_model=tokens,
            apply_admission_cap=capped,
        )
        return int(count)
