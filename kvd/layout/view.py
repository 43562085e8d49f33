"""Views: where the bytes of one component of the cache lie, as named dimensions with byte strides.

A view is a strided array over the pool. Its element at coordinates (layer, block, kv, head, token, byte) lies at

    offset + sum(coordinate * stride)

so every layout is data: the order of the dimensions and their sizes. Nothing else in kvd distinguishes layouts.
"""

import math
from collections.abc import Mapping
from typing import Literal, cast

import msgspec

Dim = Literal["layer", "block", "kv", "head", "token", "tap", "channel", "byte"]
"""The dimensions of a view.

- `layer`: the view's layers, in the order of `View.layers`.
- `block`: block ids; the unit that engines allocate.
- `kv`: 0 is K and 1 is V.
- `head`: what tensor parallelism splits: KV heads; heads, groups or channels of a state-space layer.
- `token`: tokens in a block. Occurs twice (outer first) if an engine's block is several kernel blocks.
- `tap`: the taps of a convolution's window.
- `channel`: the channels of a convolution that stay together.
- `byte`: bytes that are always contiguous, such as one head of one token. Stride 1.
"""


class Axis(msgspec.Struct, frozen=True, array_like=True):
    """One dimension of a view: `size` coordinates, `stride` bytes apart."""

    dim: Dim
    size: int
    stride: int


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One component of the cache (K and V, a latent, a scale, a section of a state) in some layers of one rank.

    `offset` counts from the pool's base, in bytes. `layers` are global layer indexes, one a coordinate of the `layer`
    axis. `heads` is the size of the `head` dimension over all ranks: which of them this rank holds follows from its
    `Shard`, and 1 means that every rank holds the same bytes (MLA). `dtype` is the spec's unless given.
    """

    component: str
    offset: int
    axes: tuple[Axis, ...]
    layers: tuple[int, ...]
    heads: int = 1
    dtype: str | None = None

    def size(self, dim: Dim) -> int:
        """How many coordinates `dim` has; 1 if the view lacks it."""
        product = 1
        for axis in self.axes:
            if axis.dim == dim:
                product *= axis.size
        return product

    @property
    def block_stride(self) -> int:
        """Bytes from a block to the one with the next id."""
        return next(axis.stride for axis in self.axes if axis.dim == "block")

    @property
    def end(self) -> int:
        """Offset of the byte after the view's last one, from the pool's base."""
        return self.offset + sum((axis.size - 1) * axis.stride for axis in self.axes) + 1

    @property
    def block_bytes(self) -> int:
        """Bytes that one block holds in this view, over all of its layers."""
        product = 1
        for axis in self.axes:
            if axis.dim != "block":
                product *= axis.size
        return product


def strided(order: str, sizes: Mapping[str, int], *, page: int = 0) -> tuple[Axis, ...]:
    """The axes of a row-major array whose dimensions are `order`, outermost first ("layer block token head byte").

    `sizes` maps a dimension to its size; dimensions of `order` that it lacks are left out. A block of one layer is
    padded to `page` bytes, as engines do to give groups of different kinds pages of one size.
    """
    dims = [dim for dim in order.split() if dim in sizes]
    innermost = max((place for place, dim in enumerate(dims) if dim in {"layer", "block"}), default=-1)
    pieces = math.prod(sizes[dim] for dim in dims[: innermost + 1] if dim not in {"layer", "block"})
    axes: list[Axis] = []
    stride = 1
    for place in reversed(range(len(dims))):
        if place == innermost:
            stride = max(stride, page // pieces)
        axes.append(Axis(cast(Dim, dims[place]), sizes[dims[place]], stride))
        stride *= sizes[dims[place]]
    return tuple(reversed(axes))
