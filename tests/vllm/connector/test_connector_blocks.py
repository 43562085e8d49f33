"""What vLLM's own block manager says of the blocks that a request needs."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM: make test-vllm")

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.request import Request

from kvd.engines.vllm.block_manager import BlockManager
from tests.vllm.connector.connector_engine import BLOCK_TOKENS, layer_specs

pytestmark = pytest.mark.filterwarnings("default")

BLOCKS = 60
STEP_TOKENS = 2 * BLOCK_TOKENS


def manager_of(configurations: Any, kind: str, watermark: float = 0.0) -> Any:
    """With steps of two blocks."""
    config = copy.deepcopy(configurations(kind))
    config.cache_config.num_gpu_blocks_override = BLOCKS
    config.model_config.max_model_len = BLOCKS // 2 * BLOCK_TOKENS
    config.scheduler_config.max_num_batched_tokens = STEP_TOKENS
    caches = get_kv_cache_configs(config, [layer_specs(kind, 1)], [1 << 34])
    return KVCacheManager(
        generate_scheduler_kv_cache_config(caches),
        config.model_config.max_model_len,
        BLOCK_TOKENS,
        BLOCK_TOKENS,
        max_in_flight_tokens=STEP_TOKENS,
        watermark=watermark,
    )


def shortage(manager: Any, request: Any, lookahead: int = 0) -> int:
    bound = BlockManager()
    bound.bind(manager, STEP_TOKENS, lookahead, refused=lambda: None)
    return bound.shortage(request)


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


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("computed", [4 * BLOCK_TOKENS, 15 * BLOCK_TOKENS, 15 * BLOCK_TOKENS + 9])
@pytest.mark.parametrize("rest", [1, BLOCK_TOKENS, 9 * BLOCK_TOKENS])
@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_what_a_load_left_lacks_blocks_where_vllm_gives_none(
    kind: str, rest: int, computed: int, lookahead: int, configurations: Any
) -> None:
    """Else kept turns would not give way to it, nor to anything behind it, until they end."""
    manager = manager_of(configurations, kind)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    request = Request("r", [1] * (computed + rest), SamplingParams(max_tokens=1), None, block_hasher=hasher)
    load = {"num_external_computed_tokens": computed, "delay_cache_blocks": True}
    assert manager.allocate_slots(request, 0, full_sequence_must_fit=True, **load) is not None
    request.num_computed_tokens = computed
    pool = manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    new, lacked = min(rest, STEP_TOKENS), []
    while manager.allocate_slots(request, new, num_lookahead_tokens=lookahead, full_sequence_must_fit=True) is None:
        lacked.append(shortage(manager, request, lookahead))
        pool.free_blocks([taken.pop()])
    assert all(blocks > 0 for blocks in lacked)


@pytest.mark.parametrize("watermark", [0.0, 0.2])
def test_a_request_lacks_what_vllm_keeps_free_beside_those_that_run(watermark: float, configurations: Any) -> None:
    """Else kept turns would not give way to it for as long as others run."""
    manager = manager_of(configurations, "llama", watermark)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    request = Request("r", [1] * 2 * BLOCK_TOKENS, SamplingParams(max_tokens=1), None, block_hasher=hasher)
    pool = manager.block_pool
    taken, lacked = pool.get_new_blocks(pool.get_num_free_blocks()), []
    while manager.allocate_slots(request, request.num_tokens, has_scheduled_reqs=True) is None:
        lacked.append(shortage(manager, request))
        pool.free_blocks([taken.pop()])
    assert lacked
    assert all(blocks > 0 for blocks in lacked)
