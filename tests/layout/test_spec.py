import subprocess
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import BadRequest, ErrorCode
from kvd.layout import Axis, CacheSpec, Chunked, Full, Group, Shard, Sliding, State, View, strided
from kvd.limits import (
    LEAST_BLOCK_BYTES,
    MAX_BLOCKS,
    MAX_SMALL_BLOCKS,
    MAX_SPEC_BYTES,
    MAX_SPEC_COORDINATES,
    MAX_SPEC_LAYERS,
)

SIZES = {"layer": 2, "kv": 2, "block": 4, "head": 2, "token": 8, "byte": 16}
AXES = strided("layer kv block head token byte", SIZES)
VIEW = View(component="kv", offset=64, axes=AXES, layers=(0, 1), heads=2)
GROUP = Group(window=Full(), block_tokens=8, num_blocks=4, views=(VIEW,))
SHARD = Shard(stages=((0, 2),))
replace = msgspec.structs.replace


def make(**changes) -> CacheSpec:
    return CacheSpec(**{"dtype": "bfloat16", "pool_bytes": VIEW.end, "groups": (GROUP,), "shard": SHARD, **changes})


def with_view(shard=SHARD, **changes) -> CacheSpec:
    return make(groups=(replace(GROUP, views=(replace(VIEW, **changes),)),), shard=shard)


def axes(dim: str, **changes) -> tuple[Axis, ...]:
    return tuple(replace(axis, **changes) if axis.dim == dim else axis for axis in AXES)


@pytest.mark.parametrize("window", [Full(), Sliding(24), Chunked(8192)])
def test_a_spec_survives_msgpack_and_json(window) -> None:
    spec = make(groups=(replace(GROUP, window=window),))
    assert CacheSpec.decode(spec.encode()) == spec
    assert CacheSpec.decode_json(msgspec.json.encode(spec)) == spec


def of_many_views(count: int, tokens: int) -> CacheSpec:
    """A spec of `count` layers with a view each."""
    sizes = {"block": 1, "token": tokens, "byte": 1}
    views = tuple(
        View(component="kv", offset=layer * tokens, axes=strided("block token byte", sizes), layers=(layer,))
        for layer in range(count)
    )
    group = Group(window=Full(), block_tokens=tokens, num_blocks=1, views=views)
    return make(groups=(group,), shard=Shard(stages=((0, count),)), pool_bytes=count * tokens)


REFUSED = {
    "an identity without a name": (lambda: make(identity=(("", "x"),)), "identity = "),
    "an identity that is too long": (lambda: make(identity=(("model", "x" * 1025),)), "identity.model = "),
    "an identity twice": (lambda: make(identity=(("model", "a"), ("model", "b"))), "names must differ"),
    "more layers than are checked": (
        lambda: of_many_views(MAX_SPEC_LAYERS + 1, 1),
        f"layers over all views = {MAX_SPEC_LAYERS + 1}: must be from 0 to {MAX_SPEC_LAYERS}",
    ),
    "more coordinates than are planned": (
        lambda: of_many_views(4, MAX_SPEC_COORDINATES // 4),
        f"heads, tokens, taps and channels over all views = {MAX_SPEC_COORDINATES + 16}: must be",
    ),
    "a view that ends beyond the pool": (lambda: make(pool_bytes=VIEW.end - 1), f"end = {VIEW.end}"),
    "a view that begins beyond the pool": (lambda: with_view(offset=10**6), "offset = 1000000"),
    "a negative offset": (lambda: with_view(offset=-1), "offset = -1"),
    "a negative stride": (lambda: with_view(axes=axes("head", stride=-16)), "head.stride = -16"),
    "a stride that overflows": (lambda: with_view(axes=axes("head", stride=1 << 63)), "head.stride"),
    "a size that overflows": (lambda: with_view(axes=axes("byte", size=1 << 62)), "byte.size"),
    "coordinates that share bytes": (lambda: with_view(axes=axes("token", stride=15)), "token.stride = 15"),
    "a stride of zero": (lambda: with_view(axes=axes("token", stride=0)), "token.stride = 0"),
    "a size of zero": (lambda: with_view(axes=axes("token", size=0)), "token.size = 0"),
    "no bytes": (lambda: with_view(axes=AXES[:-1]), "'byte': occurs 0 times"),
    "two block axes": (lambda: with_view(axes=(AXES[0], *AXES)), "'layer': occurs 2 times"),
    "an unknown dimension": (lambda: with_view(axes=(Axis("page", 1, 9999), *AXES)), "'page'"),
    "bytes that are apart": (lambda: with_view(axes=axes("byte", size=8, stride=2)), "byte with stride 1"),
    "a block of other tokens": (lambda: with_view(axes=axes("token", size=4)), "token = 4"),
    "other blocks than the group": (lambda: with_view(axes=axes("block", size=3)), "block = 3"),
    "other heads than the shard": (lambda: with_view(heads=4), "head = 2"),
    "more layers than the axis": (lambda: with_view(layers=(0,)), "layer = 2"),
    "a layer twice": (lambda: with_view(layers=(1, 1)), "layer 1 of this component is declared 2 times"),
    "a layer of another stage": (lambda: with_view(layers=(0, 2)), "layers = 2"),
    "a component without a name": (lambda: with_view(component=""), "component = ''"),
    "a dtype without a name": (lambda: make(dtype=""), "dtype = ''"),
    "a pool of nothing": (lambda: make(pool_bytes=0), "pool_bytes = 0"),
    "a pool beyond any address": (lambda: make(pool_bytes=1 << 63), "pool_bytes"),
    "no groups": (lambda: make(groups=()), "groups = 0"),
    "no blocks": (lambda: make(groups=(replace(GROUP, num_blocks=0),)), "num_blocks = 0"),
    "more blocks than a daemon keeps": (
        lambda: make(groups=(GROUP, *(without_views(MAX_BLOCKS // 2, arena) for arena in (1, 2)))),
        f"blocks over all arenas = {MAX_BLOCKS + 4}: must be",
    ),
    "more blocks than its bytes are worth": (
        lambda: make(groups=(GROUP, without_views(MAX_SMALL_BLOCKS, 1))),
        f"blocks over all arenas = {MAX_SMALL_BLOCKS + 4}: a pool of {VIEW.end} bytes may have {MAX_SMALL_BLOCKS}:",
    ),
    "blocks without tokens": (lambda: make(groups=(replace(GROUP, block_tokens=0),)), "block_tokens = 0"),
    "a window of nothing": (lambda: make(groups=(replace(GROUP, window=Sliding(0)),)), "window.window = 0"),
    "a chunk of nothing": (lambda: make(groups=(replace(GROUP, window=Chunked(0)),)), "window.chunk = 0"),
    "tokens in a state": (lambda: make(groups=(replace(GROUP, window=State()),)), "token = 8"),
    "a rank beyond its size": (lambda: make(shard=Shard(stages=((0, 2),), tp_rank=1)), "tp_rank = 1"),
    "heads that ranks cannot share": (
        lambda: with_view(heads=4, shard=Shard(stages=((0, 2),), tp_size=3)),
        "heads = 4",
    ),
    "tokens dealt out to more ranks than there are": (lambda: dealt(4, tp_size=2), "shard.cp_size = 4"),
    "tokens dealt out unevenly": (lambda: dealt(3, tp_size=6, block_tokens=8), "block_tokens = 8: not divided by"),
    "tokens dealt out to ranks with other heads": (
        lambda: dealt(2, tp_size=2, heads=2),
        "tp_size = 2 ranks cannot hold each of them 2 times",
    ),
    "tokens dealt out where there are no heads": (lambda: dealt(2, tp_size=2, heads=0), "heads = 0"),
    "tokens of a window dealt out": (lambda: dealt(2, tp_size=2, window=Sliding(8)), "must be full attention"),
    "tokens dealt out of which a rank holds all": (lambda: dealt(2, tp_size=2, held=8), "token = 8"),
    "stages with a gap": (lambda: make(shard=Shard(stages=((0, 1), (2, 3)))), "stages"),
    "more ranks than are allowed": (lambda: make(shard=Shard(stages=((0, 1), (1, 2)), tp_size=1024)), "shard = 2048"),
    "arenas that overlap": (lambda: make(groups=(GROUP, replace(GROUP, arena=1))), "groups[1].arena = 1"),
    "an arena with two numbers of blocks": (
        lambda: make(
            groups=(
                GROUP,
                Group(window=Full(), block_tokens=8, num_blocks=3, views=(replace(VIEW, axes=axes("block", size=3)),)),
            )
        ),
        "num_blocks = 3",
    ),
    "ids of one arena that mean different bytes": (lambda: make(groups=(GROUP, shifted())), "straddle"),
}


def without_views(blocks: int, arena: int) -> Group:
    return Group(window=Full(), block_tokens=8, num_blocks=blocks, views=(), arena=arena)


def dealt(
    cp_size: int, *, tp_size: int, heads: int = 1, block_tokens: int = 0, window=None, held: int = 4
) -> CacheSpec:
    """A latent of which each rank has `held` tokens of a block."""
    inner = strided("block token byte", {"block": 4, "token": held, "byte": 16})
    view = View(component="latent", offset=0, axes=inner, layers=(0,), heads=heads)
    group = Group(window=window or Full(), block_tokens=block_tokens or cp_size * 4, num_blocks=4, views=(view,))
    return make(groups=(group,), shard=Shard(stages=((0, 2),), tp_size=tp_size, cp_size=cp_size))


def test_ranks_hold_equal_runs_of_the_tokens_that_are_dealt_out_to_them() -> None:
    spec = dealt(2, tp_size=4)
    assert spec.groups[0].block_tokens == 8
    assert spec.groups[0].held_tokens(spec.shard) == 4
    assert CacheSpec.decode(spec.encode()) == spec


def shifted() -> Group:
    """A group over the same bytes, whose block 0 begins in the middle of another's."""
    inner = strided("block token byte", {"block": 4, "token": 8, "byte": 16}, page=256)
    view = View(component="latent", offset=64 + 200, axes=inner, layers=(0,))
    return Group(window=Full(), block_tokens=8, num_blocks=4, views=(view,))


@pytest.mark.parametrize("what", REFUSED)
def test_a_spec_is_refused_that_declares(what: str) -> None:
    build, text = REFUSED[what]
    with pytest.raises(BadRequest) as refused:
        build()
    assert refused.value.code == ErrorCode.BAD_SPEC
    assert text in refused.value.text


def test_the_spec_that_all_refusals_start_from_is_sound() -> None:
    assert make().groups[0].block_bytes == 2 * 2 * 2 * 8 * 16


@pytest.mark.parametrize(
    ("blocks", "size"), [(MAX_SMALL_BLOCKS - 4, VIEW.end), (MAX_BLOCKS - 4, MAX_BLOCKS * LEAST_BLOCK_BYTES)]
)
def test_a_pool_may_have_a_million_blocks_and_more_if_it_is_large(blocks: int, size: int) -> None:
    assert make(groups=(GROUP, without_views(blocks, 1)), pool_bytes=size).arenas == {0: 4, 1: blocks}


def test_a_spec_with_a_broken_rule_is_refused_on_arrival_too() -> None:
    raw = msgspec.json.encode(make()).replace(b'"offset":64', b'"offset":65')
    with pytest.raises(BadRequest, match="pool_bytes"):
        CacheSpec.decode_json(raw)


def test_a_field_of_the_wrong_type_is_named() -> None:
    raw = msgspec.json.encode(make()).replace(b'"offset":64', b'"offset":"x"')
    with pytest.raises(BadRequest, match=r"groups.*views.*offset"):
        CacheSpec.decode_json(raw)


def test_an_oversize_spec_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(BadRequest, match=str(MAX_SPEC_BYTES)):
        CacheSpec.decode(bytes(MAX_SPEC_BYTES + 1))


@settings(max_examples=300, deadline=None)
@given(flips=st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 255)), min_size=1, max_size=4))
def test_garbage_is_accepted_or_refused_as_a_bad_spec(flips) -> None:
    raw = bytearray(make().encode())
    for place, value in flips:
        raw[place % len(raw)] = value
    try:
        spec = CacheSpec.decode(bytes(raw))
    except BadRequest as refused:
        if refused.code != ErrorCode.BAD_SPEC:
            raise
    else:
        assert all(view.end <= spec.pool_bytes for group in spec.groups for view in group.views)


@pytest.mark.real
def test_the_layout_room_is_imported_without_numpy() -> None:
    code = "import sys, kvd.layout, kvd.layout.models; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
