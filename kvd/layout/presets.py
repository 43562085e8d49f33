"""The layouts of the field, each an order of dimensions, and the components that fill them.

The names of vLLM's six layouts spell L(ayer) B(lock) H(ead) N(tokens) C(K and V packed), outermost first.
"""

from collections.abc import Sequence
from typing import Final

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

LAYOUTS: Final = {
    "flash-hnd": FLASH_HND,
    "flash-nhd": FLASH_NHD,
    "flashinfer-hnd": FLASHINFER_HND,
    "flashinfer-nhd": FLASHINFER_NHD,
    "packed-hnd": LBHNC,
    "packed-nhd": LBNHC,
    "heads-outside-blocks": LHBNC,
    "cross-layer-hnd": BLHNC,
    "cross-layer-nhd": BLNHC,
    "cross-layer-heads-outside": BHLNC,
}
"""Every layout by the name that `kvd plan` and the demo know it by."""


def attention(
    order: str,
    shard: Shard,
    layers: Sequence[int],
    *,
    num_blocks: int,
    block_tokens: int,
    heads: int,
    head_bytes: int,
    offset: int = 0,
    page: int = 0,
    slots: int = 0,
) -> View:
    """Keys and values of `layers`, laid out in `order`: `heads` KV heads over all ranks, `head_bytes` each a token.

    `page` pads a block to that many bytes. `slots` reserves room for more layers than there are, so that groups of
    different sizes overlay one allocation.
    """
    sizes = {"kv": 2, "block": num_blocks, "head": len(shard.heads(heads)), "token": block_tokens, "byte": head_bytes}
    axes = strided(order, {"layer": max(len(layers), slots), **sizes}, block_bytes=page)
    return View(component="kv", offset=offset, axes=_keep(axes, len(layers)), layers=tuple(layers), heads=heads)


def latent(
    order: str,
    layers: Sequence[int],
    *,
    num_blocks: int,
    block_tokens: int,
    token_bytes: int,
    offset: int = 0,
    component: str = "latent",
) -> View:
    """One row of `token_bytes` a token, the same on every rank: MLA's latents, or what its indexer keeps."""
    sizes = {"layer": len(layers), "block": num_blocks, "token": block_tokens, "byte": token_bytes}
    return View(component=component, offset=offset, axes=strided(order, sizes), layers=tuple(layers))


def indexer(
    layers: Sequence[int], *, num_blocks: int, block_tokens: int, key_bytes: int, scale_bytes: int, offset: int = 0
) -> tuple[View, View]:
    """The extra cache of DeepSeek's sparse-attention indexer: in each block all keys, then all of their scales."""
    page = block_tokens * (key_bytes + scale_bytes)
    sizes = {"layer": len(layers), "block": num_blocks, "token": block_tokens}
    keys = strided("layer block token byte", {**sizes, "byte": key_bytes}, block_bytes=page)
    scales = strided("layer block token byte", {**sizes, "byte": scale_bytes}, block_bytes=page)
    behind = offset + block_tokens * key_bytes
    return (
        View(component="indexer_key", offset=offset, axes=keys, layers=tuple(layers), dtype="fp8"),
        View(component="indexer_scale", offset=behind, axes=scales, layers=tuple(layers), dtype="float32"),
    )


def state(
    order: str,
    shard: Shard,
    layers: Sequence[int],
    *,
    num_blocks: int,
    sections: Sequence[tuple[str, int, int]],
    taps: int,
    channel_bytes: int,
    ssm_heads: int,
    ssm_head_bytes: int,
    ssm_dtype: str | None = None,
    offset: int = 0,
    page: int = 0,
    slots: int = 0,
) -> tuple[View, ...]:
    """The recurrent state of Mamba1, Mamba2 and gated delta nets: the convolution's window, then the SSM state.

    `order` places `tap` and `head` of the window, as in "layer block tap head byte". Its channels are `sections`, in
    order, each (name, parts over all ranks, channels of a part) and each cut by ranks on its own: Mamba2's x, B and
    C; q, k and v of a gated delta net. The SSM state is `ssm_heads` heads of `ssm_head_bytes` over all ranks.
    """
    channels = [len(shard.heads(parts)) * width for _, parts, width in sections]
    conv_bytes = taps * sum(channels) * channel_bytes
    ssm_local = len(shard.heads(ssm_heads))
    page = max(page, conv_bytes + ssm_local * ssm_head_bytes)
    sizes = {"layer": max(len(layers), slots), "block": num_blocks}
    conv_sizes = {**sizes, "tap": taps, "head": sum(channels), "byte": channel_bytes}
    axes = _keep(strided(order, conv_sizes, block_bytes=page), len(layers))
    conv = View(component="conv", offset=offset, axes=axes, layers=tuple(layers))
    views, first = [], 0
    for (name, parts, width), held in zip(sections, channels, strict=True):
        views.append(_section(conv, f"conv_{name}", first=first, held=held, parts=parts, width=width))
        first += held
    ssm_sizes = {**sizes, "head": ssm_local, "byte": ssm_head_bytes}
    ssm_order = " ".join(dim for dim in order.split() if dim not in {"tap", "head", "byte"}) + " head byte"
    ssm = _keep(strided(ssm_order, ssm_sizes, block_bytes=page), len(layers))
    behind = offset + conv_bytes
    views.append(View(component="ssm", offset=behind, axes=ssm, layers=tuple(layers), heads=ssm_heads, dtype=ssm_dtype))
    return tuple(views)


def _section(conv: View, component: str, *, first: int, held: int, parts: int, width: int) -> View:
    """The `held` channels from `first` on of a convolution's window, as parts of `width` channels, `parts` globally."""
    axes: list[Axis] = []
    offset = conv.offset
    for axis in conv.axes:
        if axis.dim == "head":
            offset += first * axis.stride
            axes += [Axis("head", held // width, axis.stride * width), Axis("channel", width, axis.stride)]
        else:
            axes.append(axis)
    return View(component=component, offset=offset, axes=tuple(axes), layers=conv.layers, heads=parts)


def _keep(axes: tuple[Axis, ...], layers: int) -> tuple[Axis, ...]:
    return tuple(Axis("layer", layers, axis.stride) if axis.dim == "layer" else axis for axis in axes)
