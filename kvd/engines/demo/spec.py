"""The specs of the pools of the demo's engines."""

from typing import Final

from kvd.engines.demo.messages import EngineConfig
from kvd.engines.demo.model import ModelConfig
from kvd.errors import ErrorCode, refusal
from kvd.layout import CacheSpec, Full, Group, Shard, View, strided
from kvd.layout.presets import LAYOUTS

ELEMENT_BYTES: Final = 4
"""The model is float32, and so is its cache."""


def cache_spec(
    model: ModelConfig, layout: str, *, tp_rank: int, tp_size: int, block_tokens: int, num_blocks: int
) -> CacheSpec:
    """The pool of one rank: `num_blocks` blocks of `block_tokens` tokens in the layout of that name.

    Raises:
        BadRequest: `BAD_SPEC`, for an unknown layout, or a TP size that does not divide the model's heads.

    """
    if layout not in LAYOUTS:
        raise refusal(ErrorCode.BAD_SPEC, f"layout = {layout!r}: must be one of {', '.join(LAYOUTS)}")
    if tp_size < 1 or model.query_heads % tp_size:
        raise refusal(
            ErrorCode.BAD_SPEC,
            f"tp_size = {tp_size}: the model's {model.query_heads} query heads cannot be split by it",
        )
    shard = Shard(stages=((0, model.layers),), tp_rank=tp_rank, tp_size=tp_size)
    axes = strided(
        LAYOUTS[layout],
        {
            "layer": model.layers,
            "block": num_blocks,
            "kv": 2,
            "head": len(shard.heads(model.kv_heads)),
            "token": block_tokens,
            "byte": model.head_dim * ELEMENT_BYTES,
        },
    )
    view = View(component="kv", offset=0, axes=axes, layers=tuple(range(model.layers)), heads=model.kv_heads)
    group = Group(window=Full(), block_tokens=block_tokens, num_blocks=num_blocks, views=(view,))
    return CacheSpec(dtype="float32", pool_bytes=view.end, groups=(group,), shard=shard)


def engine_specs(model: ModelConfig, config: EngineConfig) -> list[CacheSpec]:
    """The pools of all ranks of an engine."""
    return [
        cache_spec(
            model,
            config.layout,
            tp_rank=rank,
            tp_size=config.tp_size,
            block_tokens=config.block_tokens,
            num_blocks=config.num_blocks,
        )
        for rank in range(config.tp_size)
    ]
