"""What of SGLang's configuration changes the bytes of a token's cache."""

import json
from typing import Any

from kvd.engines import identity as common


def identity(model_config: Any, overrides: str, model: str, version: str) -> tuple[tuple[str, str], ...]:
    """The identity of an engine's caches, as `CacheSpec` has it, from SGLang's model configuration.

    `overrides` are those of the model's configuration, as JSON; `model` is what peers know it by.
    """
    fields = common.identity(
        model=model or model_config.model_path,
        revision=model_config.revision,
        dtype=model_config.dtype,
        quantization=str(model_config.quantization or "none"),
        rope=_rope(model_config),
        overrides=common.overrides(json.loads(overrides or "{}")),
        engine="SGLang",
        version=version,
    )
    return common.told(fields)


def _rope(model_config: Any) -> str:
    text = common.rope(model_config.hf_text_config.to_dict())
    return f"{text} up to {model_config.context_len} tokens" if "longrope" in text else text
