"""vLLM's one allocation, answered with the pool."""

import pytest
import torch

from kvd.engines.vllm.memory import PoolAllocation, as_tensor, check_views
from kvd.engines.vllm.spec import CacheGroup, Pages, WorkerCache
from kvd.errors import BadRequest, InternalError
from kvd.layout import Full, Shard

PAGES = Pages(
    component="attn",
    layers=(0, 1),
    offset=0,
    layer_stride=256,
    block_stride=64,
    head_stride=32,
    token_stride=8,
    heads=2,
    total_heads=2,
    kernel_tokens=4,
    cell_bytes=8,
    dtype="float16",
)
FACTS = WorkerCache(
    nbytes=512,
    num_blocks=4,
    groups=(CacheGroup(window=Full(), block_tokens=4, pages=(PAGES,)),),
    shard=Shard(stages=((0, 2),)),
)


def test_only_the_caches_allocation_is_answered_and_only_once() -> None:
    pool = torch.zeros(512, dtype=torch.int8)
    with PoolAllocation(512, lambda: pool) as allocation:
        assert torch.zeros(512) is not pool
        assert torch.zeros(511, dtype=torch.int8) is not pool
        assert not allocation.answered
        assert torch.zeros(512, dtype=torch.int8, device=torch.device("cpu")) is pool
        assert torch.zeros(512, dtype=torch.int8) is not pool
    assert torch.zeros(512, dtype=torch.int8) is not pool


def test_a_cache_on_a_device_is_refused() -> None:
    with PoolAllocation(512, lambda: torch.zeros(512)), pytest.raises(BadRequest, match="host memory"):
        torch.zeros(512, dtype=torch.int8, device="meta")


def test_the_tensor_shares_the_pools_bytes_and_clears_old_ones_if_told() -> None:
    raw = bytearray(b"\x01" * 512)
    assert as_tensor(memoryview(raw), zero=False)[0] == 1
    tensor = as_tensor(memoryview(raw), zero=True)
    assert not any(raw)
    tensor[3] = 7
    assert raw[3] == 7


def views(pool: torch.Tensor) -> dict[str, torch.Tensor]:
    """What vLLM makes of the buffer: [blocks, heads, tokens, content] a layer."""
    caches = torch.as_strided(pool, (2, 4, 2, 4, 8), (256, 64, 32, 8, 1))
    return {f"layers.{i}.attn": caches[i].view(torch.float16) for i in range(2)}


def test_views_that_lie_as_declared_are_accepted() -> None:
    pool = torch.zeros(512, dtype=torch.int8)
    check_views(FACTS, pool, views(pool), [[["layers.0.attn", "layers.1.attn"]]])


def test_views_that_lie_elsewhere_or_in_another_order_are_an_error() -> None:
    pool = torch.zeros(512, dtype=torch.int8)
    swapped = views(pool)
    swapped["layers.0.attn"], swapped["layers.1.attn"] = swapped["layers.1.attn"], swapped["layers.0.attn"]
    with pytest.raises(InternalError, match=r"layers\.0\.attn"):
        check_views(FACTS, pool, swapped, [[["layers.0.attn", "layers.1.attn"]]])
    turned = views(pool)
    turned["layers.1.attn"] = turned["layers.1.attn"].transpose(1, 2)
    with pytest.raises(InternalError, match=r"layers\.1\.attn"):
        check_views(FACTS, pool, turned, [[["layers.0.attn", "layers.1.attn"]]])
