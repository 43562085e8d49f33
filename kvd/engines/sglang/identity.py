"""What both sides of a transfer must have alike beside the layout: all that changes the bytes of a token's cache."""

import hashlib
import json
from typing import Any

from kvd.limits import MAX_IDENTITY_BYTES

_KEPT = 200
"""Characters of a text that is too long to be told as it is."""


def identity(model_config: Any, overrides: str, model: str, version: str) -> tuple[tuple[str, str], ...]:
    """The identity of an engine's caches, as `CacheSpec` has it, from SGLang's model configuration.

    `overrides` are those of the model's configuration, as JSON; `model` is what peers know it by.
    """
    named = {
        "model": model or model_config.model_path,
        "revision": model_config.revision or "none",
        "model dtype": str(model_config.dtype).removeprefix("torch."),
        "quantization": str(model_config.quantization or "none"),
        "RoPE": _rope(model_config),
        "model overrides": json.dumps(json.loads(overrides or "{}"), sort_keys=True),
        "SGLang": ".".join(version.split(".")[:2]),
    }
    return tuple((name, _short(value)) for name, value in named.items())


def _rope(model_config: Any) -> str:
    """How keys are rotated: the fields of the model's configuration, overrides applied."""
    fields = {
        name: value
        for name, value in model_config.hf_text_config.to_dict().items()
        if ("rope" in name or "rotary" in name) and value is not None
    }
    text = json.dumps(fields, sort_keys=True, default=str) if fields else "none"
    return f"{text} up to {model_config.context_len} tokens" if "longrope" in text else text


def _short(text: str) -> str:
    """The text, or its beginning and a hash of it."""
    if len(text.encode()) <= MAX_IDENTITY_BYTES:
        return text
    return f"{text[:_KEPT]}... (SHA-256 {hashlib.sha256(text.encode()).hexdigest()})"
