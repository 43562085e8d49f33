"""vLLM's KV cache in the daemon's pool.

vLLM makes its cache by one `torch.zeros(size, dtype=torch.int8)` inside a context that the connector provides; every
layer's cache is a view of that tensor. The context here answers this one call with the pool. It takes the place of the
context in which vLLM's sleep mode finds what to move out of a GPU, so a sleeping engine leaves the pool alone.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvd.engines.vllm.cache.spec import Pages, States, WorkerCache
from kvd.errors import ErrorCode, refusal

logger = logging.getLogger(__name__)


class PoolAllocation(TorchFunctionMode):
    """Answers the first allocation of exactly `nbytes` int8 zeros with `pool()`, if that is on the same device."""

    def __init__(self, nbytes: int, pool: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self._nbytes = nbytes
        self._pool = pool
        self.answered = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every torch call made inside the context."""
        kwargs = kwargs or {}
        asked = func is torch.zeros and args == (self._nbytes,) and kwargs.get("dtype") is torch.int8
        if not asked or self.answered:
            return func(*args, **kwargs)
        pool = self._pool()
        device = torch.device(kwargs.get("device") or "cpu")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device != pool.device:
            text = f"kvd lends memory of {pool.device}, this worker's cache is on {device}: attach each rank to the "
            text += "daemon of its GPU (`{rank}` in the setting `socket`), started with `--device`"
            raise refusal(ErrorCode.BAD_POOL, text)
        self.answered = True
        return pool


def warn_of_restarts(device: str, cache_config: Any) -> None:
    """Warns of a pool on a GPU that would keep this engine, restarted, from starting.

    The pool outlives the engine, so the next one finds less memory free than `gpu_memory_utilization` asks for, and
    stops before it could attach. With `kv_cache_memory_bytes` the share may be small, and the pool has the same size
    each time, without which it could not be taken over.
    """
    if device and not cache_config.kv_cache_memory_bytes:
        logger.warning(
            "the KV cache stays in the memory of %s when this engine stops: set --kv-cache-memory-bytes, and "
            "--gpu-memory-utilization to the share of all the rest, or a restarted engine finds too little free",
            device,
        )


def check_views(cache: WorkerCache, pool: torch.Tensor, caches: Mapping[str, torch.Tensor]) -> None:
    """Compares vLLM's views of its layers' caches, by their names, with what the daemon was told.

    Caches of other names share one of these.

    Raises:
        InternalError: A view differs: transfers would move other bytes than vLLM reads.

    """
    for group in cache.groups:
        for pages in group.pages:
            for place, (_, name) in enumerate(zip(pages.layers, pages.names, strict=True)):
                offset = pages.offset + place * pages.layer_stride
                expected = _expected(pages, group.held_tokens(cache.shard), cache.num_blocks)
                found = _found(caches[name], pool)
                if found != (offset, *expected):
                    text = (
                        f"{name}: vLLM's view (offset, shape, strides) is {found}, declared was {(offset, *expected)}"
                    )
                    raise refusal(ErrorCode.INTERNAL, text)


def _expected(pages: Pages | States, block_tokens: int, num_blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides in bytes of [kernel blocks, heads, tokens, bytes]; strides of dimensions of size 1 are 0."""
    if isinstance(pages, States):
        shape = (num_blocks, 1, 1, pages.nbytes)
        return shape, _where(shape, (pages.block_stride, 0, 0, 1))
    kernel_blocks = block_tokens // pages.kernel_tokens
    shape = (num_blocks * kernel_blocks, pages.heads, pages.kernel_tokens, pages.cell_bytes)
    return shape, _where(shape, (pages.block_stride // kernel_blocks, pages.head_stride, pages.token_stride, 1))


def _found(cache: torch.Tensor, pool: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    size = cache.element_size()
    shape = (*cache.shape[:-1], cache.shape[-1] * size)
    strides = (*(stride * size for stride in cache.stride()[:-1]), cache.stride(-1))
    return cache.data_ptr() - pool.data_ptr(), shape, _where(shape, strides)


def _where(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(stride if size > 1 else 0 for size, stride in zip(shape, strides, strict=True))
