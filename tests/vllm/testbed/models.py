"""Tiny models of seven architectures and a drafter, written to disk so that a real vLLM runs them without a download.

Run as `python -m tests.vllm.testbed.models FOLDER NAME...`. Weights are random but of the scale that a trained
model has: with vLLM's own dummy weights (within 0.001) attention hardly matters, and wrong KV would go unnoticed.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma3TextConfig,
    GraniteMoeHybridConfig,
    Llama4TextConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
)

from tests.vllm.testbed.catalog import VOCABULARY, WINDOW

_COMMON = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "torch_dtype": "float32",
}


def _llama() -> PretrainedConfig:
    return LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.2,
        **_COMMON,
    )


def _gemma() -> PretrainedConfig:
    """Five layers of sliding windows to one of full attention, twice: vLLM makes six groups of two layers of it."""
    return Gemma3TextConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW,
        tie_word_embeddings=False,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 2,
        initializer_range=0.2,
        **_COMMON,
    )


def _llama4() -> PretrainedConfig:
    """Three layers that attend within a chunk of tokens to one that attends to all; three query heads to a KV head."""
    layers = 4
    return Llama4TextConfig(
        hidden_size=128,
        intermediate_size=256,
        intermediate_size_mlp=256,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=32,
        attention_chunk_size=WINDOW,
        moe_layers=[],
        interleave_moe_layer_step=0,
        num_local_experts=1,
        initializer_range=0.2,
        **_COMMON,
    )


def _deepseek() -> PretrainedConfig:
    """Latent attention with dense layers; 512 + 64 is the one latent size that vLLM's CPU kernel takes.

    Its weights are smaller than those of the others: see `catalog.LATENT`.
    """
    layers = 3
    return DeepseekV2Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        first_k_dense_replace=layers,
        initializer_range=0.05,
        **_COMMON,
    )


def _qwen_next() -> PretrainedConfig:
    """Three gated delta nets to one layer of attention, with experts in all.

    Its heads have the least sizes that vLLM's kernels for these layers take on a CPU; they take bfloat16 alone.
    """
    return Qwen3NextConfig(
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        initializer_range=0.1,
        **_COMMON | {"torch_dtype": "bfloat16"},
    )


def _granite() -> PretrainedConfig:
    """Three layers of Mamba2 to one of attention."""
    return GraniteMoeHybridConfig(
        hidden_size=128,
        intermediate_size=256,
        shared_intermediate_size=256,
        num_local_experts=0,
        num_experts_per_tok=0,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        position_embedding_type="rope",
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=32,
        mamba_n_groups=2,
        mamba_chunk_size=64,
        initializer_range=0.1,
        **_COMMON,
    )


def _bench() -> PretrainedConfig:
    """The KV cache of a model of size: 16 layers, 8 KV heads of 128, 131,072 bytes a token in float32."""
    return LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        initializer_range=0.1,
        **_COMMON,
    )


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": _llama,
    "gemma": _gemma,
    "llama4": _llama4,
    "deepseek": _deepseek,
    "qwen-next": _qwen_next,
    "granite": _granite,
    "bench": _bench,
}


def _write_eagle(folder: Path) -> None:
    """A drafter for the Llama: one of its layers over its embeddings and hidden states. What it drafts is random."""
    config = _llama()
    config.num_hidden_layers = 1
    state = AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
    weights = {
        name.removeprefix("model."): weight.contiguous()
        for name, weight in state.items()
        if name.startswith("model.layers.") and "input_layernorm" not in name
    }
    weights["fc.weight"] = torch.randn(config.hidden_size, 2 * config.hidden_size) * config.initializer_range
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors")


def write(name: str, folder: Path) -> None:
    """Writes model `name` with its weights and tokenizer into `folder`."""
    torch.manual_seed(0)
    if name == "eagle":
        _write_eagle(folder)
        return
    config = CONFIGS[name]()
    AutoModelForCausalLM.from_config(config, dtype=config.dtype).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def _tokenizer() -> PreTrainedTokenizerFast:
    """One word a token: `t17` is token 17."""
    words = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t1"))  # noqa: S106  # no password
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="t0", eos_token="t1", unk_token="t1")  # noqa: S106


if __name__ == "__main__":
    for wanted in sys.argv[2:]:
        write(wanted, Path(sys.argv[1]) / wanted)
