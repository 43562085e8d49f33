"""Models as data: what each layer keeps and how far back it looks, and the spec of such a model's cache.

The examples carry the values of the models' published configurations.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Final

from kvd.layout.presets import LAYOUTS, Attention, Cache, Indexer, Latent, Placement, Recurrent, Section
from kvd.layout.shard import Shard
from kvd.layout.spec import CacheSpec, Group
from kvd.layout.view import View
from kvd.layout.window import Chunked, Full, Sliding, State, Window

LONGEST_SEQUENCE: Final = 1 << 20
"""Tokens of a state block in an engine that keeps a single state per sequence."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers with equal windows and caches: one KV-cache group, or several of equal size."""

    window: Window
    layers: tuple[int, ...]
    caches: tuple[Cache, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """A model, as far as its cache is concerned."""

    name: str
    kinds: tuple[LayerKind, ...]
    dtype: str = "bfloat16"

    @property
    def layers(self) -> int:
        """The number of layers."""
        return sum(len(kind.layers) for kind in self.kinds)


def even_stages(layers: int, pp_size: int) -> tuple[tuple[int, int], ...]:
    """`layers` cut into `pp_size` stages whose sizes differ by at most one."""
    cuts = [stage * layers // pp_size for stage in range(pp_size + 1)]
    return tuple(itertools.pairwise(cuts))


def model_spec(
    model: Model, layout: str, shard: Shard, *, num_blocks: int, block_tokens: int, overlay: bool = False
) -> CacheSpec:
    """The spec of one rank's cache of `model` in one of `LAYOUTS`, every group with `num_blocks` blocks.

    The rank holds `block_tokens` tokens of a block, which are all unless `shard` deals them out.
    Groups lie one after the other, each in an arena of its own. With `overlay` they share one, as in vLLM: kinds are
    cut into groups of as many layers as the smallest kind has, and all pages have the size of the largest.

    Raises:
        BadRequest: BAD_SPEC, for a layout that cannot overlay these pages, such as K outside blocks beside a state.

    """
    kinds = _cut_kinds(model) if overlay else model.kinds
    slots = max(len(kind.layers) for kind in kinds) if overlay else 0
    frame = Placement(
        order=LAYOUTS[layout], shard=shard, layers=(), num_blocks=num_blocks, block_tokens=block_tokens, slots=slots
    )
    if overlay:
        frame = replace(frame, page=max(_page_bytes(kind, frame) for kind in kinds))
    groups, end = [], 0
    for index, kind in enumerate(kinds):
        place = replace(frame, layers=[layer for layer in kind.layers if layer in shard.layers])
        group, stop = _group(kind, place, 0 if overlay else end, 0 if overlay else index)
        groups.append(group)
        end = max(end, stop)
    return CacheSpec(dtype=model.dtype, pool_bytes=max(1, end), groups=tuple(groups), shard=shard)


def _group(kind: LayerKind, place: Placement, offset: int, arena: int) -> tuple[Group, int]:
    """The group of a kind's layers at `place`, its caches one after the other from `offset`; and where it ends."""
    views: list[View] = []
    if place.layers:
        for cache in kind.caches:
            views += cache.views(replace(place, offset=offset))
            offset = max(view.end for view in views)
    tokens = LONGEST_SEQUENCE if isinstance(kind.window, State) else place.block_tokens * place.shard.cp_size
    group = Group(window=kind.window, block_tokens=tokens, num_blocks=place.num_blocks, views=tuple(views), arena=arena)
    return group, offset


def _cut_kinds(model: Model) -> list[LayerKind]:
    slots = min(len(kind.layers) for kind in model.kinds)
    return [
        replace(kind, layers=kind.layers[first : first + slots])
        for kind in model.kinds
        for first in range(0, len(kind.layers), slots)
    ]


def _page_bytes(kind: LayerKind, place: Placement) -> int:
    """Bytes of a block in one layer of this kind."""
    one = replace(place, layers=kind.layers[:1], slots=1)
    return sum(view.block_bytes for cache in kind.caches for view in cache.views(one))


def _every(step: int, layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Every `step`-th layer, and the others."""
    chosen = tuple(range(step - 1, layers, step))
    return chosen, tuple(layer for layer in range(layers) if layer not in chosen)


def _mixed(layers: int, step: int, heads: int, head_bytes: int, window: Window) -> tuple[LayerKind, LayerKind]:
    """Every `step`-th layer with full attention, the others with `window`, all with equal heads."""
    full, local = _every(step, layers)
    caches = (Attention(heads, head_bytes),)
    return LayerKind(Full(), full, caches), LayerKind(window, local, caches)


def _gated_delta_net() -> Recurrent:
    sections = (Section("q", 16, 128), Section("k", 16, 128), Section("v", 32, 128))
    return Recurrent(sections, taps=3, ssm_heads=32, ssm_head_bytes=128 * 128 * 2)


def _qwen3_next() -> tuple[LayerKind, LayerKind]:
    full, linear = _every(4, 48)
    attention = LayerKind(Full(), full, (Attention(heads=2, head_bytes=256 * 2),))
    return attention, LayerKind(State(), linear, (_gated_delta_net(),))


def _mamba1() -> Recurrent:
    return Recurrent((Section("x", 8192, 1),), taps=3, ssm_heads=8192, ssm_head_bytes=16 * 2)


def _mamba2() -> Recurrent:
    sections = (Section("x", 128, 64), Section("B", 8, 128), Section("C", 8, 128))
    return Recurrent(sections, taps=3, ssm_heads=128, ssm_head_bytes=64 * 128 * 2)


_ALL_61: Final = tuple(range(61))
_ALL_64: Final = tuple(range(64))

_EXAMPLES: Final = (
    Model("Llama-3-8B", (LayerKind(Full(), tuple(range(32)), (Attention(8, 128 * 2),)),)),
    Model("Llama-3-70B", (LayerKind(Full(), tuple(range(80)), (Attention(8, 128 * 2),)),)),
    Model("Llama-4-Scout", _mixed(48, 4, heads=8, head_bytes=128 * 2, window=Chunked(8192))),
    Model("Gemma-3-27B", _mixed(62, 6, heads=16, head_bytes=128 * 2, window=Sliding(1024))),
    Model("gpt-oss-120b", _mixed(36, 2, heads=8, head_bytes=64 * 2, window=Sliding(128))),
    Model("DeepSeek-V3", (LayerKind(Full(), _ALL_61, (Latent((512 + 64) * 2),)),)),
    Model("DeepSeek-V3.2", (LayerKind(Full(), _ALL_61, (Latent((512 + 64) * 2), Indexer(128, 4))),)),
    Model("Qwen3-Next-80B", _qwen3_next()),
    Model("Falcon-Mamba-7B", (LayerKind(State(), _ALL_64, (_mamba1(),)),)),
    Model("Mamba-Codestral-7B", (LayerKind(State(), _ALL_64, (_mamba2(),)),)),
)

MODELS: Final = {model.name: model for model in _EXAMPLES}
"""The example models by name."""
