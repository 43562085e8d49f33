"""What the bytes of a layer's cache mean, by the backend of its attention: both sides must agree on it."""

from typing import Any

import vllm

from kvd.engines import identity as common
from kvd.engines.vllm.cache.spec import Order

_ROWS = frozenset({"FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TRITON_ATTN"})
"""Backends that keep each token's key of a head in a row, wherever its block begins, and its value behind that.

So by their source. Others pack the tokens of a kernel block together, or may, and then the size of that block is part
of what bytes mean.
"""
_UNEQUAL_ROWS = frozenset({"FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV"})
"""Those whose keys and values are of different sizes."""
_LATENT_ROWS = frozenset({"CPU_MLA", "CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "FLASHMLA", "TRITON_MLA"})
"""Those of latent attention: what one kernel writes for all of them."""


def order_of(vllm_config: Any, spec: Any, backend: str, kernel_tokens: int) -> Order:
    """What lies in a head's part of a kernel block."""
    if backend in _ROWS and spec.num_head_slots is None:
        return "rows"
    if backend != "CPU_ATTN":
        return "whole"
    # Kernels for vectors write one number of a key after another, a kernel block apart; others pack them.
    plain = _instructions(vllm_config, spec, kernel_tokens) in {"vec", "vec16"}
    return "dimensions" if plain and not _stored_as(vllm_config, spec) else "split"


def format_of(vllm_config: Any, spec: Any, backend: str, kernel_tokens: int) -> str:
    """What a head's part of a kernel block means beside its order.

    Where it is rows, or numbers one by one, other engines have the same.
    """
    stored = _stored_as(vllm_config, spec)
    parts = [_dtype(spec), stored] if stored else [_dtype(spec)]
    if order_of(vllm_config, spec, backend, kernel_tokens) in {"rows", "dimensions"} or backend in _LATENT_ROWS:
        return "/".join(parts)
    parts.append(backend)
    if backend == "CPU_ATTN":
        parts.append(_instructions(vllm_config, spec, kernel_tokens))
    if spec.num_head_slots not in {None, spec.num_kv_heads}:
        # K and V of a rank's heads lie in slots of their own: other ranks' slots lie between those of one head.
        parts.append(f"{spec.num_head_slots} head slots of TP {vllm_config.parallel_config.tensor_parallel_size}")
    if backend not in _UNEQUAL_ROWS or spec.num_head_slots is not None:
        parts.append(f"packed by {kernel_tokens} tokens")
    return "/".join(parts)


def _dtype(spec: Any) -> str:
    return str(spec.dtype).removeprefix("torch.")


def _stored_as(vllm_config: Any, spec: Any) -> str:
    """The format of numbers that are not stored as they are, of whose two names one."""
    name = str(vllm_config.cache_config.cache_dtype)
    if name in {"auto", _dtype(spec)}:
        return ""
    return "fp8_e4m3" if name == "fp8" else name


def _instructions(vllm_config: Any, spec: Any, kernel_tokens: int) -> str:
    """For which instruction set vLLM's CPU kernels are: the model's dtype chooses among them, too."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415 - CPU builds only

    name = vllm_config.cache_config.cache_dtype
    return str(_get_attn_isa(vllm_config.model_config.dtype, kernel_tokens, spec.head_size, name))


def identity(vllm_config: Any, model: str, drafter: str = "") -> tuple[tuple[str, str], ...]:
    """The identity of an engine's caches, as `CacheSpec` has it; `model` and `drafter` are what peers know them by."""
    config = vllm_config.model_config
    fields = common.identity(
        model=model,
        revision=config.revision,
        dtype=config.dtype,
        quantization=_quantization(config),
        rope=_rope(config),
        overrides=_overrides(config.hf_overrides),
        engine="vLLM",
        version=vllm.__version__,
    )
    return common.told(fields | ({"drafter": drafter} if drafter else {}))


def _quantization(config: Any) -> str:
    """The method, as vLLM found it in the model or was told, with what it was told of it."""
    method = str(config.quantization or "none")
    return method if config.quantization_config is None else f"{method} {config.quantization_config}"


def _rope(config: Any) -> str:
    fields = config.hf_text_config.to_dict()
    text = common.rope(fields)
    parameters = fields.get("rope_parameters") or {}
    if parameters.get("rope_type") == "longrope":
        # vLLM takes the factors for long contexts from the first token on if it may come to serve one.
        is_long = config.max_model_len > parameters["original_max_position_embeddings"]
        text += f" for {'long' if is_long else 'short'} contexts"
    return text


def _overrides(overrides: Any) -> str:
    return f"{overrides.__module__}.{overrides.__qualname__}" if callable(overrides) else common.overrides(overrides)
