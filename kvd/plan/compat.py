"""Compatibility: whether blocks can move between two layouts, decided once for each peer."""

import math
from typing import NoReturn

from kvd.errors import ErrorCode, refusal
from kvd.layout import VERSION_OF, CacheSpec, Dim, Group, State, View

_EXTENTS: dict[Dim, str] = {
    "byte": "bytes of a head (head size)",
    "kv": "kv",
    "tap": "taps",
    "channel": "channels",
}


def check_compatible(source: CacheSpec, destination: CacheSpec) -> None:
    """Refuses a pair of specs between which no plan can be made.

    The two may be any ranks of their engines: layers that only one of them holds are not compared.

    Raises:
        BadRequest: INCOMPATIBLE, naming the field and both sides' values.

    """
    _check_identity(dict(source.identity), dict(destination.identity))
    _same("layers of the model", source.shard.stages[-1][1], destination.shard.stages[-1][1])
    _same("number of groups", len(source.groups), len(destination.groups))
    for index, (ours, theirs) in enumerate(zip(source.groups, destination.groups, strict=True)):
        _check_groups(f"groups[{index}]", ours, theirs, source, destination)


def _refuse(field: str, source: object, destination: object) -> NoReturn:
    raise refusal(ErrorCode.INCOMPATIBLE, f"{field}: source has {source}, destination has {destination}")


def _same(field: str, source: object, destination: object) -> None:
    if source != destination:
        _refuse(field, source, destination)


def _check_identity(source: dict[str, str], destination: dict[str, str]) -> None:
    for name in {**source, **destination}:
        if name.startswith(VERSION_OF) and not (name in source and name in destination):
            continue  # the two are different engines
        _same(name, source.get(name, "none"), destination.get(name, "none"))


def _check_groups(field: str, ours: Group, theirs: Group, source: CacheSpec, destination: CacheSpec) -> None:
    _same(f"{field}.window", ours.window, theirs.window)
    if not isinstance(ours.window, State):
        small, large = sorted((ours.block_tokens, theirs.block_tokens))
        if large % small:
            _refuse(f"{field}.block_tokens (one must divide the other)", ours.block_tokens, theirs.block_tokens)
    held_there, held_here = ours.held_tokens(source.shard), theirs.held_tokens(destination.shard)
    if source.shard.cp_size > 1 or destination.shard.cp_size > 1:
        _same(f"{field}: tokens of a block on one rank (context parallelism)", held_there, held_here)
    common = set(source.shard.layers) & set(destination.shard.layers)
    held, wanted = _layers_by_component(ours, common), _layers_by_component(theirs, common)
    _same(f"{field}.components", sorted(held), sorted(wanted))
    for component, layers in held.items():
        _same(f"{field}.{component}.layers", layers, wanted[component])
    wanted_views = {(view.component, layer): view for view in theirs.views for layer in view.layers}
    for view in ours.views:
        shared = (layer for layer in view.layers if layer in common)
        for other in {id(other): other for other in (wanted_views[view.component, layer] for layer in shared)}.values():
            _same(f"{field}.{view.component}.dtype", view.dtype or source.dtype, other.dtype or destination.dtype)
            _check_views(f"{field}.{view.component}", view, other, min(held_there, held_here))


def _layers_by_component(group: Group, common: set[int]) -> dict[str, list[int]]:
    layers: dict[str, list[int]] = {}
    for view in group.views:
        shared = common.intersection(view.layers)
        if shared:
            layers.setdefault(view.component, []).extend(shared)
    return {component: sorted(held) for component, held in layers.items()}


def _check_views(field: str, ours: View, theirs: View, small: int) -> None:
    for dim, name in _EXTENTS.items():
        _same(f"{field}: {name}", ours.size(dim), theirs.size(dim))
    _same(f"{field}.heads", ours.heads, theirs.heads)
    for view in (ours, theirs):
        kernel_block = [axis.size for axis in view.axes if axis.dim == "token"][-1:]
        if kernel_block and math.gcd(kernel_block[0], small) not in {small, kernel_block[0]}:
            sizes = [[axis.size for axis in side.axes if axis.dim == "token"] for side in (ours, theirs)]
            _refuse(f"{field}: tokens of a kernel block (one must divide the smaller block)", *sizes)
