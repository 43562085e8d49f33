import struct

import pytest
import torch

from kvd.engines.demo.paged import PagedCache, view_tensor
from kvd.engines.demo.spec import cache_spec
from kvd.errors import BadRequest, ErrorCode
from kvd.layout import View, strided
from tests.engines.demo.sides import make_side


@pytest.mark.parametrize(("layout", "address"), [
    # layer 1, V, block 2, head 3, token 4 of 3 layers, 10 blocks of 16 tokens, 8 heads of 64 floats
    ("flash-hnd", ((((1 * 2 + 1) * 10 + 2) * 8 + 3) * 16 + 4) * 256),
    ("flash-nhd", ((((1 * 2 + 1) * 10 + 2) * 16 + 4) * 8 + 3) * 256),
    ("flashinfer-hnd", ((((1 * 10 + 2) * 2 + 1) * 8 + 3) * 16 + 4) * 256),
    ("packed-hnd", ((((1 * 10 + 2) * 8 + 3) * 16 + 4) * 2 + 1) * 256),
    ("cross-layer-hnd", ((((2 * 3 + 1) * 2 + 1) * 8 + 3) * 16 + 4) * 256),
    ("cross-layer-packed-hnd", ((((2 * 3 + 1) * 8 + 3) * 16 + 4) * 2 + 1) * 256),
])  # fmt: skip
def test_a_value_lies_where_the_name_of_the_layout_says(model, layout, address):
    spec = cache_spec(model.config, layout, tp_rank=0, tp_size=1, block_tokens=16, num_blocks=10)
    pool = bytearray(spec.pool_bytes)
    PagedCache(memoryview(pool), spec).layers[1][1][2, 3, 4] = 7.0
    expected = bytearray(spec.pool_bytes)
    expected[address : address + 256] = torch.full((64,), 7.0).numpy().tobytes()
    assert pool == expected


def test_a_view_starts_at_its_offset_and_may_be_one_layer_alone():
    axes = strided("block kv head token byte", {"block": 3, "kv": 2, "head": 2, "token": 4, "byte": 8})
    view = View(component="kv", offset=40, axes=axes, layers=(5,), heads=2)
    pool = memoryview(bytearray(view.end))
    tensor = view_tensor(pool, view, torch.float32)
    assert tensor.shape == (1, 2, 3, 2, 4, 2)
    tensor[0, 1, 2, 1, 3] = torch.tensor([1.0, 2.0])
    assert bytes(pool[-8:]) == struct.pack("<2f", 1.0, 2.0)
    tensor[0, 0, 0, 0, 0] = torch.tensor([3.0, 4.0])
    assert bytes(pool[40:48]) == struct.pack("<2f", 3.0, 4.0)


def test_writing_tokens_changes_their_slots_and_no_other_byte(model):
    side = make_side(model, tp=2)
    cache = side.ranks[1]
    k, v = torch.randn(5, 4, 64), torch.randn(5, 4, 64)
    cache.write(2, [7, 3, 9], 14, k, v)
    untouched = torch.ones(16, 4, 16, dtype=torch.bool)  # blocks, heads, tokens
    untouched[7, :, 14:] = False
    untouched[3, :, :3] = False
    keys, values = cache.layers[2]
    for cached, written in ((keys, k), (values, v)):
        assert torch.equal(cached.isnan().all(-1), untouched)
        assert torch.equal(cached[7, :, 14:].transpose(0, 1), written[:2])
        assert torch.equal(cached[3, :, :3].transpose(0, 1), written[2:])
    assert keys.isnan().sum() == untouched.sum() * 64
    assert torch.stack([*cache.layers[0], *cache.layers[1]]).isnan().all()


def test_reading_gathers_the_blocks_of_the_table_in_order(model):
    cache = make_side(model).ranks[0]
    k, v = torch.randn(37, 8, 64), torch.randn(37, 8, 64)
    cache.write(0, [5, 0, 11], 0, k, v)
    keys, values = cache.read(0, [5, 0, 11, 2], 37)
    assert torch.equal(keys, k)
    assert torch.equal(values, v)


def test_a_rank_holds_its_heads_and_replicas_hold_the_same_one(model):
    def heads(rank, size):
        spec = cache_spec(model.config, "flash-hnd", tp_rank=rank, tp_size=size, block_tokens=4, num_blocks=2)
        return PagedCache(memoryview(bytearray(spec.pool_bytes)), spec).heads

    assert heads(1, 4) == range(2, 4)
    assert heads(4, 16) == heads(5, 16) == range(2, 3)


def test_an_unknown_layout_is_refused_with_the_names_there_are(model):
    with pytest.raises(BadRequest, match="'flash': must be one of flash-hnd") as refused:
        cache_spec(model.config, "flash", tp_rank=0, tp_size=1, block_tokens=4, num_blocks=2)
    assert refused.value.code is ErrorCode.BAD_SPEC


def test_a_tp_size_that_does_not_cut_the_heads_is_refused(model):
    with pytest.raises(BadRequest, match="tp_size = 3: the model's 16 query heads"):
        cache_spec(model.config, "flash-hnd", tp_rank=0, tp_size=3, block_tokens=4, num_blocks=2)
