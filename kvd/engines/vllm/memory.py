"""vLLM's KV cache in the daemon's pool.

vLLM makes its cache by one `torch.zeros(size, dtype=torch.int8)` inside a context that the connector provides; every
layer's cache is a view of that tensor. The context here answers this one call with the pool.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvd.engines.vllm.spec import Pages, WorkerCache
from kvd.errors import BadRequest, ErrorCode, InternalError


class PoolAllocation(TorchFunctionMode):
    """Answers the first allocation of exactly `nbytes` int8 zeros on the CPU with `pool()`."""

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
        if torch.device(kwargs.get("device") or "cpu").type != "cpu":
            raise BadRequest(ErrorCode.BAD_POOL, f"kvd lends host memory, this worker's cache is on {kwargs['device']}")
        self.answered = True
        return self._pool()


def as_tensor(pool: memoryview, *, zero: bool) -> torch.Tensor:
    """The pool as int8 [nbytes], sharing its memory. `zero` clears what an earlier session left."""
    tensor = torch.frombuffer(pool, dtype=torch.int8)
    return tensor.zero_() if zero else tensor


def check_views(cache: WorkerCache, pool: torch.Tensor, caches: Mapping[str, torch.Tensor], names: Any) -> None:
    """Compares vLLM's views of its layers' caches with what the daemon was told.

    `names[group][i]` are the layers' names of the i-th pages of the group. Caches of other names share one of these.

    Raises:
        InternalError: A view differs: transfers would move other bytes than vLLM reads.

    """
    for group, group_names in zip(cache.groups, names, strict=True):
        for pages, layers in zip(group.pages, group_names, strict=True):
            for number, name in enumerate(layers):
                offset = pages.offset + number * pages.layer_stride
                expected = _expected(pages, group.block_tokens, cache.num_blocks)
                found = _found(caches[name], pool)
                if found != (offset, *expected):
                    text = (
                        f"{name}: vLLM's view (offset, shape, strides) is {found}, declared was {(offset, *expected)}"
                    )
                    raise InternalError(ErrorCode.INTERNAL, text)


def _expected(pages: Pages, block_tokens: int, num_blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides in bytes of [kernel blocks, heads, tokens, bytes]; strides of dimensions of size 1 are 0."""
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
