"""The cache of a vLLM worker as a `CacheSpec`. Pure; `kvd.engines.vllm.cache.config` reads it from vLLM.

vLLM allocates one buffer for each worker. Each of its "KV cache tensors" puts layers of one shape in it: block b of the
tensor's l-th layer begins at `offset + l * layer_stride + b * block_stride`, and inside it are heads, tokens and bytes
in the order of the layout, or a recurrent state. Tensors of different groups lie on top of each other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from kvd.errors import ErrorCode, refusal
from kvd.layout import Axis, CacheSpec, Group, Shard, View, Window
from kvd.layout.presets import LBHNC, Placement, Recurrent
from kvd.plan import KEYS, VALUES

Order = Literal["whole", "rows", "split", "dimensions"]
"""What lies in a head's part of a kernel block.

- `whole`: for each token what only its kernels know.
- `rows`: for each token its key, then its value.
- `split`: all keys, then all values, each in an order that only their kernels know.
- `dimensions`: all keys, the first number of each token before the second ones; then all values, in rows.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """A KV cache tensor of vLLM, or the part of it whose layers are of one kind. Strides and sizes are in bytes.

    `heads` is what this rank holds of `total_heads`; 1 of 1 means that all ranks hold the same (MLA). A block may be
    several kernel blocks of `kernel_tokens` tokens. `cell_bytes` is one head of one token, K and V together.
    """

    component: str
    layers: tuple[int, ...]
    offset: int
    layer_stride: int
    block_stride: int
    head_stride: int
    token_stride: int
    heads: int
    total_heads: int
    kernel_tokens: int
    cell_bytes: int
    dtype: str
    order: Order = "whole"
    element_bytes: int = 0
    """Of one number of a key; where keys lie by dimension."""
    names: tuple[str, ...] = ()
    """What vLLM calls the layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """A KV cache tensor of vLLM whose layers keep recurrent states. Strides are in bytes.

    A block is one state, at its begin; `nbytes` is what this rank holds of it.
    """

    component: str
    layers: tuple[int, ...]
    offset: int
    layer_stride: int
    block_stride: int
    state: Recurrent
    nbytes: int
    dtype: str
    names: tuple[str, ...] = ()
    """What vLLM calls the layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """One KV cache group of vLLM: its blocks serve all of `pages`, whose layers attend within `window`."""

    window: Window
    block_tokens: int
    pages: tuple[Pages | States, ...]

    def held_tokens(self, shard: Shard) -> int:
        """The tokens of a block that a rank holds."""
        return self.block_tokens // shard.cp_size


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCache:
    """The cache of one worker: a buffer of `nbytes` bytes, in which every group has block ids below `num_blocks`."""

    nbytes: int
    num_blocks: int
    groups: tuple[CacheGroup, ...]
    shard: Shard
    identity: tuple[tuple[str, str], ...] = ()


def cache_spec(cache: WorkerCache) -> CacheSpec:
    """The spec of the pool that replaces the buffer.

    Raises:
        BadRequest: `BAD_SPEC`, kvd cannot address a cache like this.

    """
    if not cache.nbytes:
        raise refusal(ErrorCode.BAD_SPEC, "the model keeps no KV cache; there is nothing for kvd to move")
    groups = tuple(
        Group(
            window=group.window,
            block_tokens=group.block_tokens,
            num_blocks=cache.num_blocks,
            views=tuple(view for pages in group.pages for view in _views(pages, group.held_tokens(cache.shard), cache)),
        )
        for group in cache.groups
    )
    dtype = next(pages.dtype for group in cache.groups for pages in group.pages)  # a stage may hold none of the first
    return CacheSpec(dtype=dtype, pool_bytes=cache.nbytes, groups=groups, shard=cache.shard, identity=cache.identity)


def _views(pages: Pages | States, block_tokens: int, cache: WorkerCache) -> Iterator[View]:
    if isinstance(pages, States):
        yield from _state_views(pages, cache)
    elif pages.order == "dimensions":
        yield from _keys_and_values(pages, block_tokens, cache.num_blocks)
    else:
        yield _view(pages, pages.component, _cell(pages), block_tokens, cache.num_blocks)


def _state_views(states: States, cache: WorkerCache) -> Iterator[View]:
    """A view of each section of the convolution's inputs, and one of the state."""
    place = Placement(
        order=LBHNC,
        shard=cache.shard,
        layers=states.layers,
        num_blocks=cache.num_blocks,
        block_tokens=1,
        offset=states.offset,
        page=states.block_stride,
    )
    views = states.state.views(place)
    held = sum(view.block_bytes for view in views) // len(states.layers)
    if held != states.nbytes:
        text = f"{states.component}: a state of {states.nbytes} bytes, of which {held} are known"
        raise refusal(ErrorCode.BAD_SPEC, text)
    for view in views:
        axes = (msgspec.structs.replace(view.axes[0], stride=states.layer_stride), *view.axes[1:])
        component = f"{states.component} {view.component}"
        yield msgspec.structs.replace(view, component=component, axes=axes, dtype=states.dtype)


def _view(pages: Pages, component: str, cell: tuple[Axis, ...], block_tokens: int, num_blocks: int) -> View:
    """The view whose axes inside a head's part of a kernel block are those of `cell`."""
    kernel_blocks, rest = divmod(block_tokens, pages.kernel_tokens)
    if rest:
        text = f"blocks of {block_tokens} tokens cannot be kernel blocks of {pages.kernel_tokens}"
        raise refusal(ErrorCode.BAD_SPEC, text)
    outer = (Axis("token", kernel_blocks, pages.block_stride // kernel_blocks),) if kernel_blocks > 1 else ()
    return View(
        component=component,
        offset=pages.offset,
        axes=(
            Axis("layer", len(pages.layers), pages.layer_stride),
            Axis("block", num_blocks, pages.block_stride),
            *outer,
            Axis("head", pages.heads, pages.head_stride),
            *cell,
        ),
        layers=pages.layers,
        heads=pages.total_heads,
        dtype=pages.dtype,
    )


def _cell(pages: Pages) -> tuple[Axis, ...]:
    """The axes inside a head's part of a kernel block, of keys and values together."""
    tokens, half = pages.kernel_tokens, pages.cell_bytes // 2
    match pages.order:
        case "rows":
            return Axis("token", tokens, pages.token_stride), Axis("kv", 2, half), Axis("byte", half, 1)
        case "split":
            _check_tokens_inside(pages)
            return Axis("kv", 2, tokens * half), Axis("token", tokens, half), Axis("byte", half, 1)
        case _:
            return Axis("token", tokens, pages.token_stride), Axis("byte", pages.cell_bytes, 1)


def _keys_and_values(pages: Pages, block_tokens: int, num_blocks: int) -> Iterator[View]:
    """A view of the keys and one of the values, both number by number: so rows of other engines fit either."""
    _check_tokens_inside(pages)
    tokens, half, width = pages.kernel_tokens, pages.cell_bytes // 2, pages.element_bytes
    channels = half // width
    keys = Axis("channel", channels, tokens * width), Axis("token", tokens, width), Axis("byte", width, 1)
    values = Axis("token", tokens, half), Axis("channel", channels, width), Axis("byte", width, 1)
    for name, offset, cell in ((KEYS, 0, keys), (VALUES, tokens * half, values)):
        view = _view(pages, pages.component + name, cell, block_tokens, num_blocks)
        yield msgspec.structs.replace(view, offset=pages.offset + offset)


def _check_tokens_inside(pages: Pages) -> None:
    if pages.token_stride != pages.cell_bytes:
        text = f"{pages.component}: keys before values need a layout with tokens inside heads (LBHNC)"
        raise refusal(ErrorCode.BAD_SPEC, text)
