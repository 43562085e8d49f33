"""Known layouts, each an order of dimensions, and the components that fill them.

The names of vLLM's six layouts spell L(ayer) B(lock) H(ead) N(tokens) C(K and V packed), outermost first. In
layouts whose blocks of all layers keep K and V apart, K is that dimension.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from kvd.layout.shard import Shard
from kvd.layout.view import Axis, View, strided

FLASH_HND: Final = "layer kv block head token byte"
FLASH_NHD: Final = "layer kv block token head byte"
FLASHINFER_HND: Final = "layer block kv head token byte"
FLASHINFER_NHD: Final = "layer block kv token head byte"
LBHNC: Final = "layer block head token kv byte"
LBNHC: Final = "layer block token head kv byte"
LHBNC: Final = "layer head block token kv byte"
BLHNC: Final = "block layer head token kv byte"
BLNHC: Final = "block layer token head kv byte"
BHLNC: Final = "block head layer token kv byte"
BLKHN: Final = "block layer kv head token byte"
BLKNH: Final = "block layer kv token head byte"

LAYOUTS: Final = {
    "flash-hnd": FLASH_HND,
    "flash-nhd": FLASH_NHD,
    "flashinfer-hnd": FLASHINFER_HND,
    "flashinfer-nhd": FLASHINFER_NHD,
    "packed-hnd": LBHNC,
    "packed-nhd": LBNHC,
    "heads-outside-blocks": LHBNC,
    "cross-layer-hnd": BLKHN,
    "cross-layer-nhd": BLKNH,
    "cross-layer-packed-hnd": BLHNC,
    "cross-layer-packed-nhd": BLNHC,
    "cross-layer-heads-outside": BHLNC,
}
"""Every layout by its name in `kvd plan` and the demo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a cache goes: the `layers` of one group on one rank, from byte `offset` of the pool.

    `order` is one of the layouts. `block_tokens` are those of a block that lie on this rank. A layer's share of a block
    is padded to `page` bytes. `slots` reserves room for more layers than there are, so that groups of different numbers
    of layers overlay one allocation.
    """

    order: str
    shard: Shard
    layers: Sequence[int]
    num_blocks: int
    block_tokens: int
    offset: int = 0
    page: int = 0
    slots: int = 0

    def view(
        self, component: str, inside: str, sizes: dict[str, int], *, heads: int = 1, dtype: str | None = None
    ) -> View:
        """A view whose dimensions other than layer and block are `inside`, of these `sizes`."""
        order = f"block layer {inside}" if self.order.startswith("block") else f"layer block {inside}"
        return self.ordered_view(component, order, sizes, heads=heads, dtype=dtype)

    def ordered_view(
        self, component: str, order: str, sizes: dict[str, int], *, heads: int = 1, dtype: str | None = None
    ) -> View:
        """A view whose dimensions lie in `order`, of these `sizes`."""
        outer = {"layer": max(len(self.layers), self.slots), "block": self.num_blocks}
        axes = tuple(
            Axis("layer", len(self.layers), axis.stride) if axis.dim == "layer" else axis
            for axis in strided(order, {**outer, **sizes}, page=self.page)
        )
        layers = tuple(self.layers)
        return View(component=component, offset=self.offset, axes=axes, layers=layers, heads=heads, dtype=dtype)


class Cache(Protocol):
    """What a layer keeps."""

    def views(self, place: Placement) -> tuple[View, ...]:
        """The views of this cache at `place`."""
        ...


@dataclass(frozen=True, slots=True)
class Attention:
    """Keys and values: `heads` KV heads over all ranks, `head_bytes` each for one token's key (and for its value)."""

    heads: int
    head_bytes: int

    def views(self, place: Placement) -> tuple[View, ...]:
        """One view, in the order of `place`."""
        local = len(place.shard.heads(self.heads))
        sizes = {"kv": 2, "head": local, "token": place.block_tokens, "byte": self.head_bytes}
        return (place.ordered_view("kv", place.order, sizes, heads=self.heads),)


@dataclass(frozen=True, slots=True)
class Latent:
    """MLA: one row of `token_bytes` per token, the same on every rank."""

    token_bytes: int

    def views(self, place: Placement) -> tuple[View, ...]:
        """One view without heads."""
        return (place.view("latent", "token byte", {"token": place.block_tokens, "byte": self.token_bytes}),)


@dataclass(frozen=True, slots=True)
class Indexer:
    """The extra cache of DeepSeek's sparse attention: in each block all tokens' keys, then all of their scales."""

    key_bytes: int
    scale_bytes: int

    def views(self, place: Placement) -> tuple[View, ...]:
        """Two views that share pages: keys, and scales behind them."""
        tokens = place.block_tokens
        page = max(place.page, tokens * (self.key_bytes + self.scale_bytes))
        keys = replace(place, page=page)
        scales = replace(keys, offset=place.offset + tokens * self.key_bytes)
        return (
            keys.view("indexer_key", "token byte", {"token": tokens, "byte": self.key_bytes}, dtype="fp8"),
            scales.view("indexer_scale", "token byte", {"token": tokens, "byte": self.scale_bytes}, dtype="float32"),
        )


@dataclass(frozen=True, slots=True)
class Section:
    """Channels of a convolution: `parts` of `width` channels over all ranks, which split them by parts."""

    name: str
    parts: int
    width: int


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The state of Mamba1, Mamba2 and gated delta nets: the last inputs of a convolution, then the SSM state.

    The convolution's channels are `sections`, in order, each cut by ranks on its own: x, B and C of Mamba2; q, k and v
    of a gated delta net. A section with fewer parts than ranks is replicated. `taps` is the kernel's size less one,
    and `conv_order` says whether taps or channels ("head") are the outer dimension of the window. The SSM state is
    `ssm_heads` heads of `ssm_head_bytes` over all ranks.
    """

    sections: tuple[Section, ...]
    taps: int
    ssm_heads: int
    ssm_head_bytes: int
    channel_bytes: int = 2
    conv_order: str = "tap head"

    def views(self, place: Placement) -> tuple[View, ...]:
        """One view a section, and one of the SSM state, all in the same pages."""
        channels = [len(place.shard.heads(section.parts)) * section.width for section in self.sections]
        conv_bytes = self.taps * sum(channels) * self.channel_bytes
        ssm_sizes = {"head": len(place.shard.heads(self.ssm_heads)), "byte": self.ssm_head_bytes}
        page = max(place.page, conv_bytes + ssm_sizes["head"] * self.ssm_head_bytes)
        conv_place = replace(place, page=page)
        conv_sizes = {"tap": self.taps, "head": sum(channels), "byte": self.channel_bytes}
        conv = conv_place.view("conv", f"{self.conv_order} byte", conv_sizes)
        firsts = itertools.accumulate(channels, initial=0)
        sections = (_cut(conv, section, *cut) for section, *cut in zip(self.sections, firsts, channels, strict=False))
        ssm_place = replace(conv_place, offset=place.offset + conv_bytes)
        ssm = ssm_place.view("ssm", "head byte", ssm_sizes, heads=self.ssm_heads)
        return (*sections, ssm)


def _cut(conv: View, section: Section, first: int, held: int) -> View:
    """The `held` channels from `first` of a convolution's window."""
    axes: list[Axis] = []
    offset = conv.offset
    for axis in conv.axes:
        if axis.dim == "head":
            offset += first * axis.stride
            axes.append(Axis("head", held // section.width, axis.stride * section.width))
            axes.append(Axis("channel", section.width, axis.stride))
        else:
            axes.append(axis)
    name = f"conv_{section.name}"
    return View(component=name, offset=offset, axes=tuple(axes), layers=conv.layers, heads=section.parts)
