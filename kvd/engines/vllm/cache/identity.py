"""What of vLLM's configuration changes the bytes of a token's cache."""

from typing import Any

import vllm

from kvd.engines import identity as common


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
