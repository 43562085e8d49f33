"""What both sides of a transfer must have alike beside the layout: all that changes the bytes of a token's cache.

Both call the parts of a cache by the same names, `KV` and `LATENT`, and tell each other a prompt's `checksum`.

A model has the same identity on every engine, so that one may decode what another has prefilled. Engines are given
most of it with the model's path. What can be set beside that is compared as it took effect where the engine knows that,
as for RoPE, and as it was given where it does not.
"""

import array
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvd.layout import VERSION_OF
from kvd.limits import MAX_IDENTITY_BYTES

KV: Final = "kv"
"""Keys and values of attention heads; with `kvd.plan.KEYS` or `VALUES` behind it, one of the two."""

LATENT: Final = "latent"
"""What latent attention keeps of a token: compressed keys and values, and behind them the rotated part of the key."""


_KEPT = 200
"""Characters of a text that is too long to be told as it is."""


def identity(
    *,
    model: str,
    revision: str | None,
    dtype: object,
    quantization: str,
    rope: str,
    overrides: str,
    engine: str,
    version: str,
) -> dict[str, str]:
    """The identity of an engine's caches by name, as `CacheSpec` has it once it is `told`, alike on all its ranks.

    `model` is what peers know it by, `dtype` torch's or its name. Of the `version` the first two numbers are compared,
    with those of the same `engine`: no other number stands for the format of its caches.
    """
    return {
        "model": model,
        "revision": revision or "none",
        "model dtype": str(dtype).removeprefix("torch."),
        "quantization": quantization,
        "RoPE": rope,
        "model overrides": overrides,
        VERSION_OF + engine: ".".join(version.split(".")[:2]),
    }


def rope(fields: Mapping[str, Any]) -> str:
    """How keys are rotated: what the fields of the model's configuration, overrides applied, say of that."""
    return _json({name: _plain(value) for name, value in fields.items() if is_ropes(name) and value is not None})


def overrides(given: Mapping[str, Any]) -> str:
    """What was given in place of the model's configuration, but for RoPE, whose effect is compared."""
    return _json({name: value for name, value in given.items() if not is_ropes(name)})


def is_ropes(name: str) -> bool:
    """Whether a field of a model's configuration is about RoPE."""
    return "rope" in name or "rotary" in name


def told(fields: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The fields with texts that are not too long: of those that are, the beginning and a hash."""
    return tuple((name, _short(value)) for name, value in fields.items())


def checksum(tokens: Sequence[int]) -> int:
    """CRC-32 of a prompt's tokens, by which every engine's adapter knows prompts apart."""
    return zlib.crc32(array.array("q", tokens).tobytes())


def _plain(value: Any) -> Any:
    """A value as every engine has it: some add the name by which older configurations called `rope_type`."""
    if not isinstance(value, Mapping):
        return value
    plain = {name: _plain(part) for name, part in value.items() if part is not None}
    if plain.get("type") == plain.get("rope_type"):
        plain.pop("type", None)
    return plain


def _json(fields: dict[str, Any]) -> str:
    return json.dumps(fields, sort_keys=True, default=str) if fields else "none"


def _short(text: str) -> str:
    if len(text.encode()) <= MAX_IDENTITY_BYTES:
        return text
    return f"{text[:_KEPT]}... (SHA-256 {hashlib.sha256(text.encode()).hexdigest()})"
