"""vLLM's one allocation, answered with the pool."""

from types import SimpleNamespace

import pytest
import torch

from kvd.engines.vllm.cache.memory import PoolAllocation, check_views, warn_of_restarts
from kvd.engines.vllm.cache.spec import CacheGroup, Pages, WorkerCache
from kvd.errors import BadRequest, InternalError
from kvd.layout import Full, Shard

PAGES = Pages(
    component="attn",
    layers=(0, 1),
    names=("layers.0.attn", "layers.1.attn"),
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


def test_a_cache_on_the_pools_device_is_answered_there() -> None:
    pool = torch.zeros(512, dtype=torch.int8, device="meta")
    with PoolAllocation(512, lambda: pool):
        assert torch.zeros(512, dtype=torch.int8, device="meta") is pool


def test_a_cache_on_another_device_than_the_pool_is_refused_with_both() -> None:
    text = "kvd lends memory of cpu, this worker's cache is on meta: attach each rank to the daemon of its GPU"
    with PoolAllocation(512, lambda: torch.zeros(512)), pytest.raises(BadRequest, match=text):
        torch.zeros(512, dtype=torch.int8, device="meta")


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with PoolAllocation(512, lambda: torch.zeros(512)), pytest.raises(BadRequest, match="cache is on cuda:3"):
        torch.zeros(512, dtype=torch.int8, device="cuda")


@pytest.mark.parametrize(
    ("device", "nbytes", "warned"), [("GPU-1", None, True), ("GPU-1", 1 << 30, False), ("", None, False)]
)
def test_a_pool_that_would_be_in_the_way_of_a_restart_is_warned_of(
    device: str, nbytes: int | None, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_restarts(device, SimpleNamespace(kv_cache_memory_bytes=nbytes))
    assert ("--kv-cache-memory-bytes" in caplog.text) is warned


def test_vllm_restarts_beside_its_pool_if_its_share_is_that_of_the_rest() -> None:
    utils = pytest.importorskip("vllm.v1.worker.utils")
    gib = 1 << 30
    beside_its_pool = SimpleNamespace(total_memory=80 * gib, free_memory=30 * gib, device_="cuda:0")
    with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
        utils.request_memory(beside_its_pool, SimpleNamespace(gpu_memory_utilization=0.9))
    assert utils.request_memory(beside_its_pool, SimpleNamespace(gpu_memory_utilization=0.35)) <= 30 * gib


def views(pool: torch.Tensor) -> dict[str, torch.Tensor]:
    """What vLLM makes of the buffer: [blocks, heads, tokens, content] a layer."""
    caches = torch.as_strided(pool, (2, 4, 2, 4, 8), (256, 64, 32, 8, 1))
    return {f"layers.{i}.attn": caches[i].view(torch.float16) for i in range(2)}


def test_views_that_lie_as_declared_are_accepted() -> None:
    pool = torch.zeros(512, dtype=torch.int8)
    check_views(FACTS, pool, views(pool))


def test_views_that_lie_elsewhere_or_in_another_order_are_an_error() -> None:
    pool = torch.zeros(512, dtype=torch.int8)
    swapped = views(pool)
    swapped["layers.0.attn"], swapped["layers.1.attn"] = swapped["layers.1.attn"], swapped["layers.0.attn"]
    with pytest.raises(InternalError, match=r"layers\.0\.attn"):
        check_views(FACTS, pool, swapped)
    turned = views(pool)
    turned["layers.1.attn"] = turned["layers.1.attn"].transpose(1, 2)
    with pytest.raises(InternalError, match=r"layers\.1\.attn"):
        check_views(FACTS, pool, turned)
