"""What vLLM's own block manager says of the blocks that a request needs."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM: make test-vllm")

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_configs

from kvd.engines.vllm.loads import shortage
from tests.vllm.connector.connector_engine import BLOCK_TOKENS, layer_specs

pytestmark = pytest.mark.filterwarnings("default")

BLOCKS = 60


def manager_of(configurations: Any, kind: str) -> Any:
    """With steps of two blocks."""
    config = copy.deepcopy(configurations(kind))
    config.cache_config.num_gpu_blocks_override = BLOCKS
    config.model_config.max_model_len = BLOCKS // 2 * BLOCK_TOKENS
    config.scheduler_config.max_num_batched_tokens = 2 * BLOCK_TOKENS
    caches = get_kv_cache_configs(config, [layer_specs(kind, 1)], [1 << 34])
    return KVCacheManager(
        generate_scheduler_kv_cache_config(caches),
        config.model_config.max_model_len,
        BLOCK_TOKENS,
        BLOCK_TOKENS,
        max_in_flight_tokens=2 * BLOCK_TOKENS,
    )


@pytest.mark.parametrize("kind", ["gemma", "mamba2"])
def test_windows_and_states_lack_no_blocks_that_vllm_gives_back_on_the_way(kind: str, configurations: Any) -> None:
    """A failed load would wait for them, and the engine with it, where vLLM could compute it at once."""
    manager = manager_of(configurations, kind)
    groups = len(manager.coordinator.single_type_managers)
    assert groups > 1
    blocks = BLOCKS // 2
    request = SimpleNamespace(request_id="r", num_tokens=blocks * BLOCK_TOKENS, num_computed_tokens=0)
    assert blocks * groups > BLOCKS
    assert shortage(manager, request) < 0


@pytest.mark.parametrize("kind", ["llama", "gemma", "mamba2"])
def test_a_cache_that_others_fill_lacks_blocks(kind: str, configurations: Any) -> None:
    manager = manager_of(configurations, kind)
    request = SimpleNamespace(request_id="r", num_tokens=20 * BLOCK_TOKENS, num_computed_tokens=0)
    assert shortage(manager, request) < 0
    taken = manager.block_pool.get_new_blocks(manager.block_pool.get_num_free_blocks() - 10)
    assert shortage(manager, request) >= 10
    manager.block_pool.free_blocks(taken)
    assert shortage(manager, request) < 0
