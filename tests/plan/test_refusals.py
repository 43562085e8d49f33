"""What cannot be mapped is refused when two specs meet, with the field and both values."""

import msgspec
import pytest

from kvd.errors import BadRequest, ErrorCode
from kvd.layout import VERSION_OF, Chunked, Full, Sliding, State
from kvd.layout.models import LayerKind, Model
from kvd.layout.presets import Attention, Latent, Recurrent, Section
from kvd.plan import check_compatible, route
from tests.plan.layout_buffers import engine, model

replace = msgspec.structs.replace


def spec(heads=8, head_bytes=16, *, window=None, layers=(0, 1), block=16, dtype="bfloat16", **options):
    kind = LayerKind(window or Full(), tuple(layers), (Attention(heads, head_bytes),))
    return engine(Model("test", (kind,), dtype), "packed-hnd", block=block, **options)[0]


def recurrent(taps=3, width=4):
    cache = Recurrent((Section("x", 8, width),), taps, ssm_heads=8, ssm_head_bytes=8)
    return engine(model(LayerKind(State(), (0, 1), (cache,))), "packed-hnd")[0]


def ssm_in_float32(spec):
    (group,) = spec.groups
    views = tuple(replace(view, dtype="float32") if view.component == "ssm" else view for view in group.views)
    return replace(spec, groups=(replace(group, views=views),))


def two_groups(first, second):
    kinds = [LayerKind(Full(), tuple(layers), (Attention(8, 16),)) for layers in (first, second)]
    return engine(model(*kinds), "packed-hnd", block=16)[0]


def latent(**options):
    return engine(model(LayerKind(Full(), (0, 1), (Latent(16),))), "packed-hnd", **{"block": 16, **options})[0]


def of(**identity):
    return replace(spec(), identity=tuple(identity.items()))


REFUSED = {
    "identity": (of(model="a", dtype="f"), of(model="b", dtype="f"), "model: source has a, destination has b"),
    "what one side names alone": (of(model="a"), of(), "model: source has a, destination has none"),
    "what the other side names alone": (of(), of(drafter="e"), "drafter: source has none, destination has e"),
    "the version of one engine": (
        of(**{f"{VERSION_OF}E": "1", "model": "a"}),
        of(**{f"{VERSION_OF}E": "2", "model": "a"}),
        "version of E: source has 1, destination has 2",
    ),
    "dtype": (spec(), spec(dtype="fp8"), "groups[0].kv.dtype: source has bfloat16, destination has fp8"),
    "dtype of one component": (
        recurrent(),
        ssm_in_float32(recurrent()),
        "groups[0].ssm.dtype: source has bfloat16, destination has float32",
    ),
    "head size": (spec(), spec(head_bytes=32), "(head size): source has 16, destination has 32"),
    "KV heads": (spec(), spec(heads=4), "groups[0].kv.heads: source has 8, destination has 4"),
    "block ratio": (
        spec(block=16),
        spec(block=24),
        "groups[0].block_tokens (one must divide the other): source has 16, destination has 24",
    ),
    "tokens of a block on a rank where they are dealt out": (
        latent(tp=2, cp=2, block=16),
        latent(block=32),
        "(context parallelism): source has 16, destination has 32",
    ),
    "window": (
        spec(window=Sliding(24)),
        spec(window=Sliding(32)),
        "groups[0].window: source has Sliding(window=24), destination has Sliding(window=32)",
    ),
    "kind of window": (spec(window=Chunked(32)), spec(), "source has Chunked(chunk=32), destination has Full()"),
    "number of layers": (spec(), spec(layers=(0, 1, 2)), "layers of the model: source has 2, destination has 3"),
    "number of groups": (two_groups((0,), (1,)), spec(), "number of groups: source has 2, destination has 1"),
    "layer sets": (
        two_groups((0, 1), (2,)),
        two_groups((0,), (1, 2)),
        "groups[0].kv.layers: source has [0, 1], destination has [0]",
    ),
    "components": (spec(), latent(), "groups[0].components: source has ['kv'], destination has ['latent']"),
    "taps": (recurrent(), recurrent(taps=2), "groups[0].conv_x: taps: source has 3, destination has 2"),
    "channels": (recurrent(), recurrent(width=2), "groups[0].conv_x: channels: source has 4, destination has 2"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_both_values_are_named_where_the_sides_differ_in(field: str) -> None:
    ours, theirs, text = REFUSED[field]
    with pytest.raises(BadRequest) as refused:
        check_compatible(ours, theirs)
    assert refused.value.code == ErrorCode.INCOMPATIBLE
    assert text in refused.value.text


def test_versions_of_two_engines_are_not_compared() -> None:
    one, other = (of(**{VERSION_OF + engine: number, "model": "a"}) for engine, number in (("E", "1"), ("F", "2")))
    check_compatible(one, other)


def with_kernel_blocks(pages: int, tokens: int):
    whole = spec(block=pages * tokens)
    view = whole.groups[0].views[0]
    axes = []
    for axis in view.axes:
        if axis.dim == "token":
            axes.append(replace(axis, size=pages, stride=axis.stride * tokens))
        axes.append(replace(axis, size=tokens) if axis.dim == "token" else axis)
    group = replace(whole.groups[0], views=(replace(view, axes=tuple(axes)),))
    return replace(whole, groups=(group,))


def test_kernel_blocks_that_do_not_nest_are_refused() -> None:
    check_compatible(with_kernel_blocks(3, 16), with_kernel_blocks(6, 8))
    with pytest.raises(BadRequest, match=r"kernel block .*: source has \[3, 16\], destination has \[1, 24\]"):
        check_compatible(with_kernel_blocks(3, 16), with_kernel_blocks(1, 24))


def test_the_same_model_is_compatible_however_it_is_cut_and_laid_out() -> None:
    (ours,) = engine(model(LayerKind(Full(), (0, 1), (Attention(8, 16),))), "flash-hnd", block=16)
    theirs = engine(model(LayerKind(Full(), (0, 1), (Attention(8, 16),))), "cross-layer-nhd", block=64, tp=8, pp=2)
    for rank in theirs:
        check_compatible(ours, rank)
        check_compatible(rank, ours)


def test_pipeline_ranks_without_a_common_layer_have_nothing_to_disagree_on() -> None:
    first, second = engine(model(LayerKind(Full(), (0, 1), (Attention(8, 16),))), "flash-hnd", pp=2)
    check_compatible(first, second)
    assert route([first, second], second).readers == (1, 1)


@pytest.mark.parametrize("ranks", [[0], [0, 0], [0, 1, 1], []])
def test_a_route_needs_each_rank_of_the_producer_once(ranks: list[int]) -> None:
    engine_ranks = engine(model(LayerKind(Full(), (0, 1), (Attention(8, 16),))), "flash-hnd", tp=2)
    with pytest.raises(BadRequest, match="source ranks: got") as refused:
        route([engine_ranks[rank] for rank in ranks], engine_ranks[0])
    assert refused.value.code == ErrorCode.INCOMPATIBLE


def test_a_route_needs_ranks_of_one_engine() -> None:
    kind = model(LayerKind(Full(), (0, 1), (Attention(8, 16),)))
    wide, deep = engine(kind, "flash-hnd", tp=2), engine(kind, "flash-hnd", pp=2)
    with pytest.raises(BadRequest, match="source ranks of one engine"):
        route([wide[0], deep[1]], wide[0])
