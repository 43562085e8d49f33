import numpy as np
import pytest

from kvd.errors import BadRequest
from kvd.layout import Shard, View, strided
from kvd.layout.models import MODELS, even_stages, model_spec
from kvd.layout.presets import LAYOUTS, Attention, Indexer, Placement, Recurrent, Section

BLOCKS, HEADS, TOKENS, DIM, LAYERS = 7, 4, 16, 8, 3
SHAPES = {
    "flash-hnd": ((LAYERS, 2, BLOCKS, HEADS, TOKENS, DIM), "layer kv block head token byte"),
    "flash-nhd": ((LAYERS, 2, BLOCKS, TOKENS, HEADS, DIM), "layer kv block token head byte"),
    "flashinfer-hnd": ((LAYERS, BLOCKS, 2, HEADS, TOKENS, DIM), "layer block kv head token byte"),
    "flashinfer-nhd": ((LAYERS, BLOCKS, 2, TOKENS, HEADS, DIM), "layer block kv token head byte"),
    "packed-hnd": ((LAYERS, BLOCKS, HEADS, TOKENS, 2, DIM), "layer block head token kv byte"),
    "packed-nhd": ((LAYERS, BLOCKS, TOKENS, HEADS, 2, DIM), "layer block token head kv byte"),
    "heads-outside-blocks": ((LAYERS, HEADS, BLOCKS, TOKENS, 2, DIM), "layer head block token kv byte"),
    "cross-layer-hnd": ((BLOCKS, LAYERS, 2, HEADS, TOKENS, DIM), "block layer kv head token byte"),
    "cross-layer-nhd": ((BLOCKS, LAYERS, 2, TOKENS, HEADS, DIM), "block layer kv token head byte"),
    "cross-layer-packed-hnd": ((BLOCKS, LAYERS, HEADS, TOKENS, 2, DIM), "block layer head token kv byte"),
    "cross-layer-packed-nhd": ((BLOCKS, LAYERS, TOKENS, HEADS, 2, DIM), "block layer token head kv byte"),
    "cross-layer-heads-outside": ((BLOCKS, HEADS, LAYERS, TOKENS, 2, DIM), "block head layer token kv byte"),
}


def place(order: str, **options) -> Placement:
    return Placement(
        order=order,
        shard=Shard(stages=((0, LAYERS),)),
        layers=range(LAYERS),
        num_blocks=BLOCKS,
        block_tokens=TOKENS,
        **options,
    )


def test_every_layout_is_known_by_its_shape() -> None:
    assert SHAPES.keys() == LAYOUTS.keys()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_has_the_strides_of_the_array_of_its_shape(layout: str) -> None:
    shape, dims = SHAPES[layout]
    (view,) = Attention(HEADS, DIM).views(place(LAYOUTS[layout]))
    assert [axis.dim for axis in view.axes] == dims.split()
    assert tuple(axis.size for axis in view.axes) == shape
    assert tuple(axis.stride for axis in view.axes) == np.zeros(shape, dtype=np.uint8).strides
    assert view.end == np.prod(shape)


def test_a_page_pads_the_block_of_one_layer() -> None:
    sizes = {"layer": 2, "block": 3, "token": 4, "byte": 5}
    assert [axis.stride for axis in strided("layer block token byte", sizes, page=32)] == [96, 32, 5, 1]
    assert [axis.stride for axis in strided("block layer token byte", sizes, page=32)] == [64, 32, 5, 1]


def test_the_indexers_scales_lie_behind_the_keys_of_their_block() -> None:
    keys, scales = Indexer(key_bytes=128, scale_bytes=4).views(place(LAYOUTS["packed-nhd"]))
    assert (keys.offset, scales.offset) == (0, 128 * TOKENS)
    assert keys.block_stride == scales.block_stride == 132 * TOKENS


def test_a_state_page_holds_the_sections_of_the_convolution_and_then_the_ssm_state() -> None:
    recurrent = Recurrent((Section("x", 8, 4), Section("B", 2, 4)), taps=3, ssm_heads=8, ssm_head_bytes=10)
    x, b, ssm = recurrent.views(place(LAYOUTS["packed-nhd"]))
    assert (x.offset, b.offset, ssm.offset) == (0, 8 * 4 * 2, 3 * 40 * 2)
    assert {view.block_stride for view in (x, b, ssm)} == {3 * 40 * 2 + 80}
    assert [axis.stride for axis in x.axes if axis.dim in {"tap", "head", "channel"}] == [80, 8, 2]


def per_block(name: str, tp_size: int = 1) -> list[int]:
    model = MODELS[name]
    shard = Shard(stages=even_stages(model.layers, 1), tp_size=tp_size)
    spec = model_spec(model, "packed-nhd", shard, num_blocks=2, block_tokens=16)
    return [group.block_bytes for group in spec.groups]


def test_example_models_keep_the_bytes_a_token_that_are_published_for_them() -> None:
    assert per_block("Llama-3-8B") == [16 * 32 * 2 * 8 * 128 * 2] == [16 * 131_072]
    assert per_block("Llama-3-70B") == [16 * 327_680]
    assert per_block("Llama-4-Scout") == [16 * 12 * 4096, 16 * 36 * 4096]
    assert per_block("Gemma-3-27B") == [16 * 10 * 8192, 16 * 52 * 8192]
    assert per_block("gpt-oss-120b") == [16 * 18 * 2048, 16 * 18 * 2048]
    assert per_block("DeepSeek-V3") == [16 * 70_272]
    assert per_block("DeepSeek-V3.2") == [16 * (70_272 + 61 * 132)]
    assert per_block("Qwen3-Next-80B") == [16 * 12 * 2048, 36 * (3 * 8192 * 2 + 32 * 128 * 128 * 2)]
    assert per_block("Falcon-Mamba-7B") == [64 * 8192 * (3 + 16) * 2]
    assert per_block("Mamba-Codestral-7B") == [64 * (3 * (8192 + 2048) * 2 + 128 * 64 * 128 * 2)]


def test_ranks_cut_heads_and_replicate_what_has_too_few() -> None:
    assert per_block("Llama-3-8B", tp_size=8) == [16 * 131_072 // 8]
    assert per_block("DeepSeek-V3", tp_size=8) == per_block("DeepSeek-V3")
    assert per_block("Qwen3-Next-80B", tp_size=4)[0] == 16 * 12 * 1024


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_example_has_a_sound_spec_in_every_layout(name: str, layout: str) -> None:
    model = MODELS[name]
    for pp_size in (1, 3):
        shard = Shard(stages=even_stages(model.layers, pp_size), tp_size=2, tp_rank=1, pp_rank=pp_size - 1)
        spec = model_spec(model, layout, shard, num_blocks=3, block_tokens=16)
        held = {layer for group in spec.groups for view in group.views for layer in view.layers}
        assert held == set(shard.layers)


@pytest.mark.parametrize("layout", ["packed-hnd", "cross-layer-hnd", "flash-nhd"])
def test_overlaid_groups_share_one_arena_of_equal_pages(layout: str) -> None:
    model = MODELS["Gemma-3-27B"]
    shard = Shard(stages=even_stages(model.layers, 1))
    spec = model_spec(model, layout, shard, num_blocks=5, block_tokens=16, overlay=True)
    assert [len(group.views[0].layers) for group in spec.groups] == [10, 10, 10, 10, 10, 10, 2]
    assert {group.arena for group in spec.groups} == {0}
    assert spec.pool_bytes == 5 * 10 * 16 * 8192


def test_states_overlay_attention_blocks_padded_to_their_pages() -> None:
    model = MODELS["Qwen3-Next-80B"]
    shard = Shard(stages=even_stages(model.layers, 1))
    spec = model_spec(model, "packed-nhd", shard, num_blocks=5, block_tokens=16, overlay=True)
    strides = {view.block_stride for group in spec.groups for view in group.views}
    assert strides == {3 * 8192 * 2 + 32 * 128 * 128 * 2}


def test_k_outside_blocks_cannot_overlay_the_pages_of_a_state() -> None:
    model = MODELS["Qwen3-Next-80B"]
    shard = Shard(stages=even_stages(model.layers, 1))
    with pytest.raises(BadRequest, match="pages of"):
        model_spec(model, "flash-nhd", shard, num_blocks=5, block_tokens=16, overlay=True)


def test_a_view_without_a_dimension_has_one_coordinate_of_it() -> None:
    view = View(component="kv", offset=0, axes=strided("block byte", {"block": 2, "byte": 3}), layers=(0,))
    assert view.size("head") == 1
