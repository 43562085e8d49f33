"""Requests whose blocks are pulled, until vLLM computes them; and what becomes of those whose pull has failed.

With `kv_load_failure_policy` "recompute" vLLM computes such a prompt itself. That takes more blocks than its load did,
where there are windows or states. vLLM would free the blocks of the load only when it comes to the request, and comes
to nothing behind one that lacks blocks: with a cache full of loads the engine would stand still for good. So these
blocks are freed as the load ends; such a request lets those pass whose loads are complete; and none begins meanwhile.
"""

from collections.abc import Set as AbstractSet
from typing import Any

from kvd.engines.vllm.block_manager import BlockManager


class Loads:
    """By request."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._loads: dict[str, Any] = {}
        """vLLM's requests."""
        self._failing: set[str] = set()
        """Those whose load has failed, and a rank's daemon may still write to their blocks."""
        self._failed: set[str] = set()
        """Those whose load has failed, and nothing is written to their blocks any more."""

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

    def is_failing(self, request: str) -> bool:
        """Whether its load has failed, and its blocks may still be written to."""
        return request in self._failing

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
        return others and self._manager.shortage(request) > 0


def has_failed_load(request: Any) -> bool:
    """Whether vLLM ends a request, which waits for its load, because that has failed (policy "fail").

    It does so before it tells the connector of the failure.
    """
    return bool(request.status.name == "FINISHED_ERROR")
