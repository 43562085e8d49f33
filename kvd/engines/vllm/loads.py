"""Requests whose blocks are pulled, until vLLM computes them; and what becomes of those whose pull has failed.

With `kv_load_failure_policy` "recompute" vLLM computes such a prompt itself. That takes more blocks than its load did,
where there are windows or states. vLLM would free the blocks of the load only when it comes to the request, and comes
to nothing behind one that lacks blocks: with a cache full of loads the engine would stand still for good. So these
blocks are freed as the load ends; such a request lets those pass whose loads are complete; and none begins meanwhile.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

_KEPT_FREE = 1 / 32
"""The share of its blocks that vLLM may keep free of requests that begin."""


@dataclass(frozen=True, slots=True)
class Steps:
    """What vLLM's scheduler gives blocks for at a time."""

    tokens: int = 1 << 40
    """The most that a step computes."""
    lookahead: int = 0
    """For which a drafter needs blocks beyond those."""


class Loads:
    """By request."""

    def __init__(self) -> None:
        self._loads: dict[str, Any] = {}
        """vLLM's requests."""
        self._failing: set[str] = set()
        """Those whose load has failed, and a rank's daemon may still write to their blocks."""
        self._failed: set[str] = set()
        """Those whose load has failed, and nothing is written to their blocks any more."""
        self._manager: Any = None
        self._steps = Steps()

    def bind(self, manager: Any, steps: Steps) -> None:
        """Takes vLLM's KV cache manager."""
        self._manager = manager
        self._steps = steps

    def begin(self, request: Any) -> None:
        """The blocks of `request` are pulled."""
        self._loads[request.request_id] = request

    def fail(self, requests: AbstractSet[str]) -> None:
        """These loads have failed, and have not ended."""
        self._failing |= self._loads.keys() & requests

    def end(self, request: str) -> Any:
        """Nothing is written to its blocks any more, which are freed if its load has failed.

        Returns the request if its load is complete, and it is not over.
        """
        if request not in self._failing:
            return self._loads.get(request)
        self._failing.remove(request)
        self._failed.add(request)
        self._manager.free(self._loads[request])  # vLLM does so again when it comes to it
        return None

    def forget(self, request: str) -> None:
        """VLLM has given it blocks to compute it, or it is over."""
        self._loads.pop(request, None)
        self._failing.discard(request)
        self._failed.discard(request)

    def has_failed(self, request: str) -> bool:
        """Whether its load has failed, and it waits for blocks."""
        return request in self._failed

    @property
    def any_failed(self) -> bool:
        """Whether a request waits for blocks whose load has failed."""
        return bool(self._failed)

    def must_wait(self, request: Any) -> bool:
        """Whether vLLM may lack blocks to compute it, and others that have theirs come behind it."""
        others = len(self._loads) > len(self._failed)
        return others and shortage(self._manager, request, self._steps) > 0


def has_failed_load(request: Any) -> bool:
    """Whether vLLM ends a request, which waits for its load, because that has failed (policy "fail").

    It does so before it tells the connector of the failure.
    """
    return bool(request.status.name == "FINISHED_ERROR")


def shortage(manager: Any, request: Any, steps: Steps) -> int:
    """How many blocks vLLM may lack for all tokens of `request`, not above 0 if it has enough; it keeps some free.

    What the prefix cache has of a request that has no blocks is not known here.
    """
    # It gives back what windows have passed before it takes more. What they have passed when a load is complete has
    # null blocks, with which alone the request has its fill of all: so it needs what its next step does, too.
    whole = _needed(manager, request, request.num_tokens, capped=True)
    next_tokens = min(request.num_tokens, request.num_computed_tokens + steps.tokens)
    needed = max(whole, _needed(manager, request, next_tokens, steps.lookahead, capped=False))
    pool = manager.block_pool
    return int(needed + _KEPT_FREE * pool.num_gpu_blocks - pool.get_num_free_blocks())


def _needed(manager: Any, request: Any, tokens: int, lookahead: int = 0, *, capped: bool) -> int:
    """How many blocks vLLM counts that `request` needs for so many tokens."""
    count = manager.coordinator.get_num_blocks_to_allocate(
        request_id=request.request_id,
        num_tokens=tokens + lookahead,
        new_computed_blocks=manager.empty_kv_cache_blocks.blocks,
        num_encoder_tokens=0,
        total_computed_tokens=request.num_computed_tokens,
        num_local_computed_tokens=request.num_computed_tokens,
        num_tokens_main_model=tokens,
        apply_admission_cap=capped,
    )
    return int(count)
