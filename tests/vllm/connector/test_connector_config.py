"""What is read from vLLM's configuration of models whose layers differ."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM: make test-vllm")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvd.engines.vllm.cache_config import _format, _identity, _total_heads
from kvd.errors import BadRequest

pytestmark = pytest.mark.filterwarnings("default")


def model(heads: int, layers: int, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(
        get_total_num_kv_heads=lambda: heads,
        get_total_num_hidden_layers=lambda: layers,
        hf_text_config=SimpleNamespace(to_dict=lambda: {"num_key_value_heads": heads, **fields}),
    )


def total(config: SimpleNamespace, ranks: int, held: int, layer: int = 0, draft: Any = None) -> int:
    """KV heads over all ranks of a layer of which each of `ranks` holds `held`."""
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        model_config=config,
        speculative_config=draft and SimpleNamespace(draft_model_config=draft, target_model_config=config),
    )
    spec = FullAttentionSpec(block_size=32, num_kv_heads=held, head_size=32, dtype=torch.bfloat16)
    return _total_heads(vllm_config, spec, f"model.layers.{layer}.self_attn.attn", layer)


@pytest.mark.parametrize(
    ("ranks", "held", "heads"),
    [(1, 8, 8), (1, 2, 2), (2, 4, 8), (2, 1, 2), (4, 2, 8), (4, 1, 2), (8, 1, 8)],
)
def test_layers_with_fewer_heads_than_the_models_count_have_those_that_its_configuration_names(
    ranks: int, held: int, heads: int
) -> None:
    """Of 8 and of 2 KV heads, as Gemma 4's local and global layers; on 8 ranks the model's own count is taken."""
    assert total(model(8, 4, num_global_key_value_heads=2), ranks, held) == heads


def test_a_layer_of_one_head_on_each_rank_is_refused_if_the_configuration_names_several_that_fit() -> None:
    with pytest.raises(BadRequest, match=r"\[16, 2, 4, 16\].*tensor parallel size"):
        total(model(16, 4, swa_num_key_value_heads=2, num_global_key_value_heads=4), 4, 1)


@pytest.mark.parametrize("slotted", [False, True])
def test_ranks_whose_keys_and_values_lie_in_slots_of_their_own_go_with_as_many_ranks_only(slotted: bool) -> None:
    """As FlashInfer has them for NVFP4."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(revision=None, dtype=torch.bfloat16),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        speculative_config=None,
    )
    identity = dict(_identity(config, "m", {"FLASHINFER"}, slotted=slotted))
    assert identity.get("tensor parallel size") == ("2" if slotted else None)


def test_a_drafters_layer_has_the_heads_of_the_drafter() -> None:
    assert total(model(8, 4), 2, 1, layer=4, draft=model(2, 1)) == 2


def described(dtype: Any, backend: str, tokens: int, kind: str = "auto", **fields: Any) -> str:
    """The format of a layer's cache for a model in bfloat16, in kernel blocks of `tokens` tokens."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16), cache_config=SimpleNamespace(cache_dtype=kind)
    )
    spec = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=32, dtype=dtype, **fields)
    return _format(config, spec, backend, tokens)


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "FLASHMLA"])
def test_rows_of_tokens_mean_the_same_in_blocks_of_any_size(backend: str) -> None:
    assert described(torch.bfloat16, backend, 16) == described(torch.bfloat16, backend, 64) == "bfloat16"


@pytest.mark.parametrize("backend", ["CPU_ATTN", "ROCM_ATTN", "DEEPSEEK_V32_INDEXER"])
def test_blocks_whose_tokens_are_or_may_be_packed_together_go_to_blocks_of_their_own_size(backend: str) -> None:
    assert described(torch.bfloat16, backend, 32).endswith("/packed by 32 tokens")
    assert described(torch.bfloat16, backend, 64).endswith("/packed by 64 tokens")


def test_heads_in_slots_go_to_blocks_of_their_own_size() -> None:
    slots = {"num_head_slots": 4, "state_content_bytes": 40}
    assert described(torch.uint8, "FLASHINFER", 32, "nvfp4", **slots) == "uint8/nvfp4/packed by 32 tokens"


@pytest.mark.parametrize(("amx", "kernels"), [(True, "amx"), (False, "vec")])
def test_a_quantized_cache_is_packed_by_the_kernels_that_the_models_dtype_has(
    monkeypatch: pytest.MonkeyPatch, amx: bool, kernels: str
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
    assert described(torch.uint8, "CPU_ATTN", 32, "fp8") == f"uint8/fp8_e4m3/{kernels}/packed by 32 tokens"


def test_the_two_names_of_one_format_are_the_same() -> None:
    assert described(torch.uint8, "FLASH_ATTN", 16, "fp8") == described(torch.uint8, "FLASH_ATTN", 16, "fp8_e4m3")
    assert described(torch.uint8, "FLASH_ATTN", 16, "fp8") != described(torch.uint8, "FLASH_ATTN", 16, "fp8_e5m2")
