"""Llama 4: three of four layers attend within chunks of 8192 tokens."""

import pytest

from kvd.layout import Chunked, Full, Shard
from kvd.layout.models import MODELS, LayerKind, even_stages, model_spec
from kvd.layout.presets import Attention
from kvd.plan.explain import explain
from tests.plan.layout_buffers import engine, model, move

SCOUT = MODELS["Llama-4-Scout"]
BYTES_A_TOKEN_AND_LAYER = 2 * 8 * 128 * 2
SMALL = model(
    LayerKind(Full(), (3,), (Attention(2, 4),)),
    LayerKind(Chunked(32), (0, 1, 2), (Attention(2, 4),)),
)


def scout(tokens: int):
    shard = Shard(stages=even_stages(48, 1))
    spec = model_spec(SCOUT, "cross-layer-hnd", shard, num_blocks=-(-tokens // 16), block_tokens=16)
    return explain([spec], spec, tokens)


def test_a_100_000_token_prefill_moves_106_blocks_of_each_local_layer() -> None:
    full, local = scout(100_000).groups
    assert (full.layers, full.blocks) == (12, 6250)
    assert (local.layers, local.blocks) == (36, 106) == (36, -(-(100_000 % 8192) // 16))
    assert local.bytes == 36 * 106 * 16 * BYTES_A_TOKEN_AND_LAYER


def test_a_full_chunk_in_each_local_layer_would_save_69_percent_and_the_exact_rule_saves_more() -> None:
    figures = scout(100_000)
    at_a_full_chunk = (12 * 100_000 + 36 * 8192) / 48
    assert at_a_full_chunk == 31_144
    assert 1 - at_a_full_chunk / 100_000 == pytest.approx(0.69, abs=0.005)
    assert figures.bytes_as_full == 48 * 100_000 * BYTES_A_TOKEN_AND_LAYER
    assert figures.bytes / figures.bytes_as_full == pytest.approx((12 * 100_000 + 36 * 106 * 16) / 48 / 100_000)
    assert 1 - figures.bytes / figures.bytes_as_full > 0.737


def test_local_layers_move_nothing_where_the_chunk_divides_the_tokens() -> None:
    full, local = scout(12 * 8192).groups
    assert (local.blocks, local.bytes, local.descriptors) == (0, 0, 0)
    assert full.blocks == 12 * 512


@pytest.mark.parametrize("tokens", [31, 32, 33, 64, 70, 96])
def test_only_the_last_partial_chunk_arrives(tokens: int) -> None:
    sources, (destination,) = engine(SMALL, "flash-hnd", block=4), engine(SMALL, "cross-layer-hnd", block=4)
    local = -(-(tokens % 32) // 4) * 4 * 3
    whole = -(-tokens // 4) * 4
    assert move(sources, destination, tokens).bytes == (whole + local) * 2 * 2 * 4
