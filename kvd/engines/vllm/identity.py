"""What both sides of a transfer must have alike beside the layout: all that changes the bytes of a token's cache.

vLLM is given most of it with the model's path. What can be set beside that is compared as it took effect where vLLM
knows that, as for RoPE, and as it was given where it does not.
"""

import hashlib
import json
from typing import Any

import vllm

from kvd.limits import MAX_IDENTITY_BYTES

_KEPT = 200
"""Characters of a text that is too long to be told as it is."""


def identity(vllm_config: Any, model: str, drafter: str = "") -> tuple[tuple[str, str], ...]:
    """The identity of an engine's caches, as `CacheSpec` has it, alike on all its ranks.

    `model` and `drafter` are what peers know them by.
    """
    config = vllm_config.model_config
    named = {
        "model": model,
        "revision": config.revision or "none",
        "model dtype": str(config.dtype).removeprefix("torch."),
        "quantization": _quantization(config),
        "RoPE": _rope(config),
        "hf_overrides": _overrides(config.hf_overrides),
        "vLLM": ".".join(vllm.__version__.split(".")[:2]),  # no other number stands for the format of its caches
    }
    if drafter:
        named["drafter"] = drafter
    return tuple((name, _short(value)) for name, value in named.items())


def _quantization(config: Any) -> str:
    """The method, as vLLM found it in the model or was told, with what it was told of it."""
    method = str(config.quantization or "none")
    return method if config.quantization_config is None else f"{method} {config.quantization_config}"


def _rope(config: Any) -> str:
    """How keys are rotated: the fields of the model's configuration, overrides applied."""
    fields = {name: value for name, value in config.hf_text_config.to_dict().items() if _is_ropes(name)}
    text = _json({name: value for name, value in fields.items() if value is not None})
    parameters = fields.get("rope_parameters") or {}
    if parameters.get("rope_type") == "longrope":
        # vLLM takes the factors for long contexts from the first token on if it may come to serve one.
        is_long = config.max_model_len > parameters["original_max_position_embeddings"]
        text += f" for {'long' if is_long else 'short'} contexts"
    return text


def _overrides(overrides: Any) -> str:
    """`--hf-overrides` but for RoPE, whose effect is compared."""
    if callable(overrides):
        return f"{overrides.__module__}.{overrides.__qualname__}"
    return _json({name: value for name, value in overrides.items() if not _is_ropes(name)})


def _is_ropes(name: str) -> bool:
    return "rope" in name or "rotary" in name


def _json(fields: dict[str, Any]) -> str:
    return json.dumps(fields, sort_keys=True, default=str) if fields else "none"


def _short(text: str) -> str:
    """The text, or its beginning and a hash of it."""
    if len(text.encode()) <= MAX_IDENTITY_BYTES:
        return text
    return f"{text[:_KEPT]}... (SHA-256 {hashlib.sha256(text.encode()).hexdigest()})"
