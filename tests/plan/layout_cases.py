"""Random engines: models, layouts, shards, allocations and block tables, small enough to walk index by index."""

from dataclasses import dataclass

from hypothesis import strategies as st

from kvd.layout import Axis, CacheSpec, Chunked, Full, Group, Shard, Sliding, State, View
from tests.plan.layout_reference import Blocks, held_heads, positions_needed


@dataclass
class Component:
    name: str
    heads: int
    inner: dict[str, int]


@dataclass
class ModelGroup:
    window: object
    layers: list[int]
    components: list[Component]


@dataclass
class Case:
    sources: list[CacheSpec]
    destination: CacheSpec
    offered: list[Blocks]
    wanted: list[Blocks]
    tokens: int


HEADS = st.sampled_from([4, 2, 1, 8])
SMALL = st.sampled_from([2, 1])


@st.composite
def model_groups(draw, *, dealt: bool) -> list[ModelGroup]:
    """With `dealt`, of latent attention alone: what ranks hold alike, so that they can deal its tokens out."""
    layers = draw(st.permutations(range(draw(st.sampled_from([3, 2, 4, 1])))))
    cuts = sorted(draw(st.lists(st.integers(1, len(layers)), max_size=2)))
    pieces = [layers[a:b] for a, b in zip([0, *cuts], [*cuts, len(layers)], strict=True) if a < b]
    groups = []
    for piece in pieces:
        window = (
            Full()
            if dealt
            else draw(
                st.one_of(
                    st.just(Full()),
                    st.builds(Sliding, window=st.sampled_from([4, 9, 20, 2, 1])),
                    st.builds(Chunked, chunk=st.sampled_from([8, 5, 20, 3, 1])),
                    st.just(State()),
                )
            )
        )
        if isinstance(window, State):
            conv = {"tap": draw(SMALL), "channel": draw(SMALL), "byte": 1}
            components = [
                Component("conv_x", draw(HEADS), conv),
                Component("conv_b", draw(HEADS), conv),
                Component("ssm", draw(HEADS), {"byte": draw(SMALL)}),
            ]
        else:
            components = [Component("kv", 1 if dealt else draw(HEADS), {"kv": draw(SMALL), "byte": draw(SMALL)})]
            if draw(st.booleans()):
                components.append(Component("scale", 1, {"byte": 1}))
        groups.append(ModelGroup(window, list(piece), components))
    return groups


@st.composite
def engine_layouts(draw, groups: list[ModelGroup], unit: list[int]) -> dict:
    """What all ranks of one engine have in common."""
    layers = sum(len(group.layers) for group in groups)
    cut = draw(st.integers(0, layers))
    stages = tuple(s for s in ((0, cut), (cut, layers)) if s[0] < s[1])
    blocks = [
        draw(st.integers(1, 30)) if isinstance(group.window, State) else size * draw(st.sampled_from([1, 1, 2, 4]))
        for group, size in zip(groups, unit, strict=True)
    ]
    dims = st.permutations(["layer", "block", "kv", "head", "token", "tap", "channel"])
    return {
        "tp_size": draw(st.sampled_from([1, 2, 4, 8, 1])),
        "cp_size": 1,
        "stages": stages,
        "blocks": blocks,
        "orders": [draw(dims) for _ in groups],
        "pads": [draw(st.sampled_from([0, 0, 1, 3])) for _ in groups],
        "split_layers": draw(st.booleans()),
        "kernel": draw(st.booleans()),
        "overlay": draw(st.booleans()),
        "num_blocks": 12 + draw(st.integers(0, 2)),
    }


def build_rank(groups: list[ModelGroup], engine: dict, pp_rank: int, tp_rank: int) -> CacheSpec:
    sizes = {name: engine[name] for name in ("stages", "tp_size", "cp_size")}
    shard = Shard(**sizes, tp_rank=tp_rank, pp_rank=pp_rank)
    overlay = engine["overlay"]
    count = engine["num_blocks"] * (len(groups) if overlay else 1)
    built, offset, page = [], 0, 0
    if overlay:
        page = max(_place(group, engine, i, shard, 0, 1, 0)[1] for i, group in enumerate(groups))
    for index, group in enumerate(groups):
        views, end = _place(group, engine, index, shard, 0 if overlay else offset, count, page)
        offset = max(offset, end)
        built.append(
            Group(
                window=group.window,
                block_tokens=engine["blocks"][index] * engine["cp_size"],
                num_blocks=count,
                views=tuple(views),
                arena=0 if overlay else index,
            )
        )
    return CacheSpec(dtype="u8", pool_bytes=max(1, offset), groups=tuple(built), shard=shard)


def _place(group: ModelGroup, engine: dict, index: int, shard: Shard, offset: int, count: int, page: int):
    """The group's views from `offset` on; with a `page`, block b lies in the page numbered b, components in a row."""
    overlay = engine["overlay"]
    held = [layer for layer in group.layers if layer in shard.layers]
    runs = [[layer] for layer in held] if engine["split_layers"] and not overlay else [held]
    order = list(engine["orders"][index])
    if overlay:
        order.remove("block")
        order.insert(0, "block")
    pad = engine["pads"][index]
    views = []
    for layers in runs:
        for component in group.components:
            if not layers:
                continue
            sizes = dict(component.inner, layer=len(layers), block=count, head=len(held_heads(component.heads, shard)))
            tokens = [] if isinstance(group.window, State) else _token_axes(engine, index)
            axes, stride = [Axis("byte", sizes["byte"], 1)], sizes["byte"] + pad
            for dim in reversed(order):
                for size in reversed(tokens) if dim == "token" else [sizes[dim]] if dim in sizes else []:
                    axes.insert(0, Axis(dim, size, page if dim == "block" and page else stride))
                    stride *= size
                    if dim in {"layer", "block"}:
                        stride += pad
            views.append(
                View(
                    component=component.name,
                    offset=offset,
                    axes=tuple(axes),
                    layers=tuple(layers),
                    heads=component.heads,
                )
            )
            inside = 1 + sum((axis.size - 1) * axis.stride for axis in axes if axis.dim != "block")
            offset += inside if overlay else views[-1].end - offset + pad
    if overlay and page and views:
        return views, max(view.end for view in views)
    return views, offset


def _token_axes(engine: dict, index: int) -> list[int]:
    size = engine["blocks"][index]
    return [size // 2, 2] if engine["kernel"] and size % 2 == 0 else [size]


@st.composite
def cases(draw) -> Case:
    dealt = draw(st.integers(0, 3)) == 0
    groups = draw(model_groups(dealt=dealt))
    unit = [draw(st.integers(1, 3)) for _ in groups]
    producer, consumer = draw(engine_layouts(groups, unit)), draw(engine_layouts(groups, unit))
    if draw(st.booleans()):
        consumer = {**producer, "tp_size": consumer["tp_size"], "stages": consumer["stages"]}
    if dealt:
        for engine in (producer, consumer):
            engine["cp_size"] = draw(st.sampled_from([size for size in (1, 2, 4, 8) if size <= engine["tp_size"]]))
        consumer["blocks"] = producer["blocks"]
    for index in range(len(groups)):  # a kernel block must divide the smaller block, or be the block
        small = min(producer["blocks"][index], consumer["blocks"][index])
        if small % 2:
            producer["kernel"] = consumer["kernel"] = False
    sources = [
        build_rank(groups, producer, pp, tp)
        for pp in range(len(producer["stages"]))
        for tp in range(producer["tp_size"])
    ]
    pp = draw(st.integers(0, len(consumer["stages"]) - 1))
    destination = build_rank(groups, consumer, pp, draw(st.integers(0, consumer["tp_size"] - 1)))
    tokens = draw(st.sampled_from([*range(5, 13), 4, 3, 2, 1, 0]))
    offered = draw(block_tables(sources[0], tokens, hits=False))
    wanted = draw(block_tables(destination, tokens, hits=True))
    return Case(sources, destination, offered, wanted, tokens)


@st.composite
def block_tables(draw, spec: CacheSpec, tokens: int, *, hits: bool) -> list[Blocks]:
    """Ids for what each group needs: without what a prefix hit already brought, or with more than is needed."""
    free: dict[int, list[int]] = {}
    tables = []
    for group in spec.groups:
        if group.arena not in free:
            ids = list(range(group.num_blocks))
            free[group.arena] = list(draw(st.one_of(st.just(ids), st.permutations(ids))))
        positions = positions_needed(group, tokens)
        if hits:
            positions = positions[draw(st.sampled_from([0, 0, 0, 1, len(positions)])) :]
        elif positions:
            positions = list(range(max(0, positions[0] - draw(st.integers(0, 1))), positions[-1] + 1))
        pool = free[group.arena]
        ids = [pool.pop() if draw(st.booleans()) else pool.pop(0) for _ in positions]
        tables.append(Blocks(positions[0] if positions else 0, ids))
    return tables
