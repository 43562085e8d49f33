"""What is read from vLLM's configuration of models whose layers differ."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM: make test-vllm")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvd.engines.vllm.cache.config import _component, _names, _state_format, _total_heads, check_supported
from kvd.engines.vllm.cache.formats import format_of, identity
from kvd.engines.vllm.cache.parallel import is_replica, rank_of, ranks_of
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


def test_a_drafters_layer_has_the_heads_of_the_drafter() -> None:
    assert total(model(8, 4), 2, 1, layer=4, draft=model(2, 1)) == 2


def drafting(draft: Any, path: str = "/models/m") -> SimpleNamespace:
    """The configuration of a model of eight heads and four layers with a drafter."""
    target = model(8, 4)
    target.model = path
    speculative = draft and SimpleNamespace(draft_model_config=draft, target_model_config=target, method="mtp")
    return SimpleNamespace(model_config=target, speculative_config=speculative)


@pytest.mark.parametrize(
    ("name", "is_draft", "place"),
    [
        ("model.layers.3.self_attn.attn", False, ("model.layers.*.self_attn.attn", 3)),
        ("model.layers.4.self_attn.attn", False, ("model.layers.*.self_attn.attn", 4)),
        ("model.layers.4.self_attn.attn", True, ("model.layers.*.self_attn.attn", 4)),
        ("mtp.layers.0.self_attn.attn", False, ("mtp.layers.*.self_attn.attn", 4)),
        ("mtp.layers.5.self_attn.attn", False, ("mtp.layers.*.self_attn.attn", 5)),
        ("draft_model.model.layers.1.self_attn.attn", False, ("draft_model.model.layers.*.self_attn.attn", 5)),
        ("speculator.layers.1.self_attn.attn", True, ("speculator.layers.*.self_attn.attn", 5)),  # vLLM 0.33 says so
        ("speculator.layers.1.self_attn.attn", False, ("speculator.layers.*.self_attn.attn", 1)),
    ],
)
def test_layers_of_a_drafter_are_numbered_after_the_models(name: str, is_draft: bool, place: tuple[str, int]) -> None:
    assert _component(drafting(model(2, 2)), SimpleNamespace(is_draft=is_draft), name) == place


def test_a_model_without_a_drafter_keeps_its_numbers_whatever_its_layers_are_called() -> None:
    assert _component(drafting(None), SimpleNamespace(), "mtp.layers.0.attn") == ("mtp.layers.*.attn", 0)


@pytest.mark.parametrize(
    ("path", "settings", "told"),
    [
        ("/models/m", ("", ""), ("/models/m", "/models/m (mtp)")),
        ("/models/m", ("ours", ""), ("ours", "ours (mtp)")),
        ("/drafters/d", ("ours", ""), ("ours", "/drafters/d (mtp)")),
        ("/drafters/d", ("ours", "theirs"), ("ours", "theirs (mtp)")),
        ("/drafters/d", ("", "theirs"), ("/models/m", "theirs (mtp)")),
    ],
)
def test_peers_are_told_of_a_drafter_by_its_setting_or_its_path_or_as_a_part_of_the_model(
    path: str, settings: tuple[str, str], told: tuple[str, str]
) -> None:
    assert _names(drafting(SimpleNamespace(model=path)), *settings) == told


def test_without_a_drafter_the_model_alone_is_told() -> None:
    assert _names(drafting(None), "", "theirs") == ("/models/m", "")


def described(dtype: Any, backend: str, tokens: int, kind: str = "auto", ranks: int = 1, **fields: Any) -> str:
    """The format of a layer's cache for a model in bfloat16, in kernel blocks of `tokens` tokens."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        cache_config=SimpleNamespace(cache_dtype=kind),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
    )
    spec = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=32, dtype=dtype, **fields)
    return format_of(config, spec, backend, tokens)


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "FLASHMLA"])
def test_rows_of_tokens_mean_the_same_in_blocks_of_any_size(backend: str) -> None:
    assert described(torch.bfloat16, backend, 16) == described(torch.bfloat16, backend, 64) == "bfloat16"


@pytest.mark.parametrize(("amx", "meant"), [(True, "bfloat16/CPU_ATTN/amx/packed by 32 tokens"), (False, "bfloat16")])
def test_keys_that_lie_by_dimension_mean_what_rows_mean_and_those_that_amx_packs_do_not(
    monkeypatch: pytest.MonkeyPatch, amx: bool, meant: str
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert described(torch.bfloat16, "CPU_ATTN", 32) == meant


@pytest.mark.parametrize("backend", ["ROCM_ATTN", "DEEPSEEK_V32_INDEXER"])
def test_blocks_whose_tokens_are_or_may_be_packed_together_go_to_blocks_of_their_own_size(backend: str) -> None:
    assert described(torch.bfloat16, backend, 32).endswith("/packed by 32 tokens")
    assert described(torch.bfloat16, backend, 64).endswith("/packed by 64 tokens")


@pytest.mark.parametrize("ranks", [1, 2])
def test_keys_and_values_in_slots_of_their_own_go_to_as_many_ranks_and_to_blocks_of_their_own_size(ranks: int) -> None:
    """As FlashInfer has them for NVFP4."""
    slots = {"num_head_slots": 4, "state_content_bytes": 40}
    assert described(torch.uint8, "FLASHINFER", 32, "nvfp4", ranks, **slots) == (
        f"uint8/nvfp4/FLASHINFER/4 head slots of TP {ranks}/packed by 32 tokens"
    )


@pytest.mark.parametrize(("amx", "kernels"), [(True, "amx"), (False, "vec")])
def test_a_quantized_cache_is_packed_by_the_kernels_that_the_models_dtype_has(
    monkeypatch: pytest.MonkeyPatch, amx: bool, kernels: str
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
    assert described(torch.uint8, "CPU_ATTN", 32, "fp8") == f"uint8/fp8_e4m3/CPU_ATTN/{kernels}/packed by 32 tokens"


@pytest.mark.parametrize(
    ("amx", "bf16", "kernels"),
    [(True, True, "cpu/amx/avx512_bf16"), (False, True, "cpu/avx512_bf16"), (False, False, "cpu")],
)
def test_a_recurrent_state_is_told_with_the_processors_kernels_that_write_it(
    monkeypatch: pytest.MonkeyPatch, amx: bool, bf16: bool, kernels: str
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    spec = SimpleNamespace(dtypes=(torch.bfloat16, torch.float32))
    assert _state_format(spec, "GDN_ATTN") == f"bfloat16+float32/GDN_ATTN/{kernels}"


def test_the_two_names_of_one_format_are_the_same() -> None:
    assert described(torch.uint8, "FLASH_ATTN", 16, "fp8") == described(torch.uint8, "FLASH_ATTN", 16, "fp8_e4m3")
    assert described(torch.uint8, "FLASH_ATTN", 16, "fp8") != described(torch.uint8, "FLASH_ATTN", 16, "fp8_e5m2")


ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 4096, "long_factor": [1.5], "short_factor": [1.0]}


def identified(rope: dict[str, Any] | None = None, *, fields: dict[str, Any] | None = None, **changes: Any) -> Any:
    """The identity of a model with these parameters of RoPE, other fields of its configuration, and vLLM's settings."""
    configuration = {"hidden_size": 64, "rope_parameters": rope or ROPE, **(fields or {})}
    config = SimpleNamespace(
        hf_text_config=SimpleNamespace(to_dict=lambda: configuration),
        **{"revision": None, "dtype": torch.bfloat16, "max_model_len": 4096, "hf_overrides": {}, **changes},
    )
    config.__dict__.setdefault("quantization", None)
    config.__dict__.setdefault("quantization_config", None)
    return dict(identity(SimpleNamespace(model_config=config), "m"))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (identified({"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}), "RoPE"),
        (identified({**ROPE, "rope_theta": 500000.0}), "RoPE"),
        (identified(fields={"partial_rotary_factor": 0.5}), "RoPE"),
        (identified(quantization="fp8"), "quantization"),
        (identified(hf_overrides={"num_experts_per_tok": 4}), "model overrides"),
        (identified(hf_overrides=identified), "model overrides"),
        (identified(revision="v2"), "revision"),
        (identified(dtype=torch.float16), "model dtype"),
    ],
)
def test_whatever_changes_the_bytes_of_a_cache_beside_the_model_is_in_the_identity(change: Any, field: str) -> None:
    plain = identified()
    assert {name for name in change if change[name] != plain[name]} == {field}


def test_an_override_that_only_says_what_the_model_says_itself_changes_nothing() -> None:
    assert identified(hf_overrides={"rope_parameters": ROPE}) == identified()


def test_a_quantization_is_told_with_what_it_was_given() -> None:
    told = identified(quantization="fp8", quantization_config={"ignore": ["lm_head"]})
    assert "lm_head" in told["quantization"]
    assert told != identified(quantization="fp8")


def test_long_rope_differs_by_whether_the_server_may_come_to_serve_a_long_context() -> None:
    short, still_short, long = (identified(LONG, max_model_len=length) for length in (2048, 4096, 4097))
    assert short == still_short != long


@pytest.mark.parametrize(
    ("tp", "pcp", "dcp", "numbers", "replicas"),
    [
        (2, 1, 1, [0, 1, 2, 3], [False] * 4),
        (2, 1, 2, [0, 1, 2, 3], [False] * 4),
        (1, 2, 2, [0, 1, 2, 3], [False] * 4),
        (1, 2, 1, [0, 0, 1, 1], [False, True] * 2),
        (2, 2, 1, [0, 1, 0, 1, 2, 3, 2, 3], [False, False, True, True] * 2),
    ],
)
def test_workers_are_numbered_by_stage_and_copies_of_a_cache_are_told_apart(
    tp: int, pcp: int, dcp: int, numbers: list[int], replicas: list[bool]
) -> None:
    """Of two pipeline stages, in the second of two replicas by data parallelism."""
    sizes = {
        "tensor_parallel_size": tp,
        "prefill_context_parallel_size": pcp,
        "decode_context_parallel_size": dcp,
        "pipeline_parallel_size": 2,
    }
    first = len(numbers)
    configs = [SimpleNamespace(parallel_config=SimpleNamespace(rank=rank, **sizes)) for rank in range(first, 2 * first)]
    assert [rank_of(config) for config in configs] == numbers
    assert [is_replica(config) for config in configs] == replicas
    assert {ranks_of(config) for config in configs} == {max(numbers) + 1}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"decode_context_parallel_size": 2}, ""),
        ({"decode_context_parallel_size": 2, "prefill_context_parallel_size": 2, "tensor_parallel_size": 1}, ""),
        ({"decode_context_parallel_size": 2, "interleave": 1}, "give --cp-kv-cache-interleave-size 32"),
        (
            {"decode_context_parallel_size": 2, "sharded": False},
            "share the tokens of 'full_attention' layers",
        ),
        ({"prefill_context_parallel_size": 4, "role": "kv_producer"}, ""),
        ({"prefill_context_parallel_size": 4}, "kv_role is 'kv_both', and must be 'kv_producer'"),
        (
            {"decode_context_parallel_size": 2, "prefill_context_parallel_size": 2},
            "kvd needs both alike and tensor_parallel_size = 1, which is 2",
        ),
        ({"experts": True}, "--enable-return-routed-experts"),
        ({"groups": [0]}, "keeps groups of this cache out"),
    ],
)
def test_what_is_not_moved_keeps_the_engine_from_starting(change: dict[str, Any], said: str) -> None:
    flags = {
        "role": "kv_both",
        "experts": False,
        "groups": [0, 1],
        "interleave": 32,
        "sharded": True,
        "tensor_parallel_size": 2,
    } | change
    sizes = {f"{kind}_context_parallel_size": 1 for kind in ("decode", "prefill")}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes | {"cp_kv_cache_interleave_size": flags["interleave"]} | flags),
        aux_output_config=SimpleNamespace(enable_return_routed_experts=flags["experts"]),
        kv_transfer_config=SimpleNamespace(kv_role=flags["role"]),
    )
    spec = FullAttentionSpec(
        block_size=32, num_kv_heads=2, head_size=32, dtype=torch.bfloat16, dcp_sharded=flags["sharded"]
    )
    groups = [SimpleNamespace(kv_cache_spec=spec)] * 2
    cache = SimpleNamespace(kv_cache_groups=groups, transfer_group_ids=flags["groups"])
    if not said:
        check_supported(config, cache)
        return
    with pytest.raises(BadRequest, match=said):
        check_supported(config, cache)
