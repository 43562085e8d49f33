"""The spec: everything a worker declares of its pool, in a form that travels in attach and hello.

The planner trusts a spec with memory: whoever could make it address a byte outside the pool could read or overwrite a
neighbour's. So a spec is checked when it is made, before any address is computed from it.
"""

from collections import Counter
from typing import Any, Final, NoReturn

import msgspec

from kvd.errors import ErrorCode, refusal
from kvd.layout.shard import Shard
from kvd.layout.view import Axis, Dim, View
from kvd.layout.window import Chunked, Full, Sliding, State, Window
from kvd.limits import (
    LEAST_BLOCK_BYTES,
    MAX_BLOCKS,
    MAX_GROUPS,
    MAX_IDENTITY_BYTES,
    MAX_IDENTITY_FIELDS,
    MAX_NAME_BYTES,
    MAX_RANKS,
    MAX_SMALL_BLOCKS,
    MAX_SPEC_BYTES,
    MAX_SPEC_COORDINATES,
    MAX_SPEC_LAYERS,
)

_ADDRESS_LIMIT = 1 << 62  # addresses are planned as int64, and two of them are added
_BLOCK_ID_LIMIT = 1 << 32  # ids are u32 on the wire
_COUNT_LIMIT = 1 << 20  # coordinates that a plan enumerates: heads, tokens, taps, layers

_OCCURRENCES: dict[Dim, range] = {
    "layer": range(2),
    "block": range(1, 2),
    "kv": range(2),
    "head": range(2),
    "token": range(3),
    "tap": range(2),
    "channel": range(2),
    "byte": range(1, 2),
}
ENUMERATED: Final[tuple[Dim, ...]] = ("kv", "head", "token", "tap", "channel")
"""The dimensions whose every index a view may place elsewhere."""


VERSION_OF: Final = "version of "
"""How names in a spec's identity begin that two engines of different kinds do not share (`check_compatible`)."""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share block tables: one list of block ids serves all of them.

    `block_tokens` is the number of tokens of a block, and block ids are below `num_blocks`. Groups that overlay one
    allocation have the same `arena` number: there, equal ids mean equal memory. A rank none of whose layers belong to
    the group declares it without views, because groups match by their index on both sides. Groups that hold no cache
    but what goes with one lie `beside` it and come last: engines of another kind have none, and then they do not move.
    """

    window: Window
    block_tokens: int
    num_blocks: int
    views: tuple[View, ...]
    arena: int = 0
    beside: bool = False

    def needed(self, tokens: int) -> range:
        """Positions that must be present once `tokens` tokens are computed (`kvd.layout.window`)."""
        return self.window.needed(tokens, self.block_tokens)

    def held_tokens(self, shard: Shard) -> int:
        """The tokens of a block that a rank holds: all of them without context parallelism."""
        return self.block_tokens // shard.cp_size

    @property
    def block_bytes(self) -> int:
        """Bytes that one block of this group holds on this rank, over all components and layers."""
        return sum(view.block_bytes for view in self.views)


class CacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The cache of one rank. Making one checks it: `BadRequest(BAD_SPEC)` names the field and its value.

    Every byte that a view can address lies in the pool of `pool_bytes`, no view overlaps itself, and arenas do not
    overlap each other. `dtype` is that of all views that give none. `identity` says what a layout does not show, by
    name: which model the bytes are of, what wrote them. Both sides of a transfer must have the same, but for the
    version of an engine (`VERSION_OF`) that the other side is not.
    """

    dtype: str
    pool_bytes: int
    groups: tuple[Group, ...]
    shard: Shard
    identity: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        _check_spec(self)

    @property
    def arenas(self) -> dict[int, int]:
        """How many blocks each arena has, by its number: those of the group that has most."""
        found: dict[int, int] = {}
        for group in self.groups:
            found[group.arena] = max(group.num_blocks, found.get(group.arena, 0))
        return found

    def encode(self) -> bytes:
        """The spec as msgpack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, raw: bytes) -> "CacheSpec":
        """The spec encoded in `raw` (msgpack).

        Raises:
            BadRequest: BAD_SPEC, naming the field and its value, if `raw` is no sound spec.

        """
        return _decode(raw, _MSGPACK)

    @classmethod
    def decode_json(cls, raw: bytes) -> "CacheSpec":
        """Like `decode`, from JSON, which people write into files."""
        return _decode(raw, _JSON)


_MSGPACK = msgspec.msgpack.Decoder(CacheSpec)
_JSON = msgspec.json.Decoder(CacheSpec)


def _decode(raw: bytes, decoder: Any) -> CacheSpec:
    if len(raw) > MAX_SPEC_BYTES:
        raise refusal(ErrorCode.BAD_SPEC, f"spec is {len(raw)} bytes, the limit is {MAX_SPEC_BYTES}")
    try:
        spec: CacheSpec = decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refusal(ErrorCode.BAD_SPEC, f"spec: {error}") from error
    return spec


def _check_spec(spec: CacheSpec) -> None:
    """Checks what `CacheSpec` promises, field by field."""
    _bounded("pool_bytes", spec.pool_bytes, 1, _ADDRESS_LIMIT)
    _check_name("dtype", spec.dtype)
    _bounded("groups", len(spec.groups), 1, MAX_GROUPS + 1)
    _check_shard(spec.shard)
    _check_identity(spec.identity)
    views = [view for group in spec.groups for view in group.views]
    _bounded("layers over all views", sum(len(view.layers) for view in views), 0, MAX_SPEC_LAYERS + 1)
    for index, group in enumerate(spec.groups):
        _check_group(f"groups[{index}]", group, spec)
    coordinates = sum(view.size(dim) for view in views for dim in ENUMERATED)
    _bounded("heads, tokens, taps and channels over all views", coordinates, 0, MAX_SPEC_COORDINATES + 1)
    _check_blocks(sum(spec.arenas.values()), spec.pool_bytes)
    _check_arenas(spec)


def _refuse(field: str, value: object, rule: str) -> NoReturn:
    raise refusal(ErrorCode.BAD_SPEC, f"{field} = {value!r}: {rule}")


def _bounded(field: str, value: int, low: int, stop: int) -> None:
    if not low <= value < stop:
        _refuse(field, value, f"must be from {low} to {stop - 1}")


def _check_name(field: str, name: str) -> None:
    if not name or len(name.encode()) > MAX_NAME_BYTES:
        _refuse(field, name[:MAX_NAME_BYTES], f"must be 1 to {MAX_NAME_BYTES} bytes")


def _check_identity(identity: tuple[tuple[str, str], ...]) -> None:
    _bounded("identity", len(identity), 0, MAX_IDENTITY_FIELDS + 1)
    for name, value in identity:
        _check_name("identity", name)
        if len(value.encode()) > MAX_IDENTITY_BYTES:
            _refuse(f"identity.{name}", value[:MAX_NAME_BYTES], f"must be at most {MAX_IDENTITY_BYTES} bytes")
    if len(dict(identity)) < len(identity):
        _refuse("identity", [name for name, _ in identity], "names must differ")


def _check_shard(shard: Shard) -> None:
    _bounded("shard.stages", len(shard.stages), 1, MAX_RANKS + 1)
    _bounded("shard.tp_size", shard.tp_size, 1, MAX_RANKS + 1)
    _bounded("shard.tp_rank", shard.tp_rank, 0, shard.tp_size)
    _bounded("shard.pp_rank", shard.pp_rank, 0, len(shard.stages))
    _bounded("shard.cp_size", shard.cp_size, 1, shard.tp_size + 1)
    if shard.ranks > MAX_RANKS:
        _refuse("shard", shard.ranks, f"tp_size times stages must be at most {MAX_RANKS}")
    stop = 0
    for stage in shard.stages:
        if stage[0] != stop or stage[1] <= stage[0]:
            _refuse("shard.stages", shard.stages, "stages must be (first, stop), each beginning where the last stops")
        stop = stage[1]
    _bounded("shard.stages", stop, 1, _COUNT_LIMIT)


def _check_group(field: str, group: Group, spec: CacheSpec) -> None:
    _bounded(f"{field}.num_blocks", group.num_blocks, 1, _BLOCK_ID_LIMIT)
    _bounded(f"{field}.block_tokens", group.block_tokens, 1, _BLOCK_ID_LIMIT)
    if spec.shard.cp_size > 1:
        _check_dealt(field, group, spec.shard.cp_size)
    if isinstance(group.window, Sliding):
        _bounded(f"{field}.window.window", group.window.window, 1, _ADDRESS_LIMIT)
    if isinstance(group.window, Chunked):
        _bounded(f"{field}.window.chunk", group.window.chunk, 1, _ADDRESS_LIMIT)
    held = Counter((view.component, layer) for view in group.views for layer in view.layers)
    for (component, layer), count in held.items():
        if count > 1:
            _refuse(f"{field}.views", component, f"layer {layer} of this component is declared {count} times")
    for index, view in enumerate(group.views):
        _check_view(f"{field}.views[{index}]", view, group, spec)


def _check_dealt(field: str, group: Group, cp_size: int) -> None:
    """Every rank must hold as many tokens of each block."""
    if not isinstance(group.window, Full):
        _refuse(f"{field}.window", group.window, f"must be full attention with shard.cp_size = {cp_size}")
    if group.block_tokens % cp_size:
        _refuse(f"{field}.block_tokens", group.block_tokens, f"not divided by shard.cp_size = {cp_size}")


def _check_view(field: str, view: View, group: Group, spec: CacheSpec) -> None:
    _check_name(f"{field}.component", view.component)
    if view.dtype is not None:
        _check_name(f"{field}.dtype", view.dtype)
    _bounded(f"{field}.heads", view.heads, 1, _COUNT_LIMIT)
    _check_axes(field, view)
    for layer in view.layers:
        if layer not in spec.shard.layers:
            _refuse(f"{field}.layers", layer, f"this rank's stage holds layers {spec.shard.layers}")
    tp_size = spec.shard.tp_size
    if view.heads % tp_size and tp_size % view.heads:
        _refuse(f"{field}.heads", view.heads, f"neither divides nor is divided by shard.tp_size = {tp_size}")
    if max(1, tp_size // view.heads) % spec.shard.cp_size:
        rule = f"tp_size = {tp_size} ranks cannot hold each of them {spec.shard.cp_size} times (shard.cp_size)"
        _refuse(f"{field}.heads", view.heads, rule)
    sizes: dict[Dim, int] = {
        "layer": len(view.layers),
        "block": group.num_blocks,
        "head": len(spec.shard.heads(view.heads)),
        "token": 1 if isinstance(group.window, State) else group.held_tokens(spec.shard),
    }
    for dim, size in sizes.items():
        if view.size(dim) != size:
            _refuse(f"{field}.axes.{dim}", view.size(dim), f"the group and the shard make it {size}")
    _bounded(f"{field}.offset", view.offset, 0, spec.pool_bytes)
    if view.end > spec.pool_bytes:
        _refuse(f"{field}.end", view.end, f"the view reaches beyond pool_bytes = {spec.pool_bytes}")


def _check_axes(field: str, view: View) -> None:
    counts = Counter(axis.dim for axis in view.axes)
    for dim in (*_OCCURRENCES, *counts):
        allowed = _OCCURRENCES.get(dim, range(0))
        if counts[dim] not in allowed:
            _refuse(f"{field}.axes", dim, f"occurs {counts[dim]} times, allowed are {list(allowed)}")
    if view.axes[-1].dim != "byte" or view.axes[-1].stride != 1:
        _refuse(f"{field}.axes", view.axes[-1].dim, "the last axis must be byte with stride 1")
    for axis in view.axes:
        stop = _ADDRESS_LIMIT if axis.dim in {"block", "byte"} else _COUNT_LIMIT
        _bounded(f"{field}.axes.{axis.dim}.size", axis.size, 1, stop)
        _bounded(f"{field}.axes.{axis.dim}.stride", axis.stride, 0, _ADDRESS_LIMIT)
    _check_apart(field, view.axes)


def _check_apart(field: str, axes: tuple[Axis, ...]) -> None:
    """No two coordinates share a byte: each stride steps over everything that the smaller strides reach."""
    reach = 1
    for axis in sorted(axes, key=lambda axis: axis.stride):
        if axis.size > 1 and axis.stride < reach:
            _refuse(f"{field}.axes.{axis.dim}.stride", axis.stride, f"overlaps the {reach} bytes inside it")
        reach += (axis.size - 1) * axis.stride


def _check_blocks(blocks: int, pool_bytes: int) -> None:
    """The daemon keeps 4 bytes for each block, also of groups without views, which take nothing of the pool."""
    _bounded("blocks over all arenas", blocks, 0, MAX_BLOCKS + 1)
    most = max(MAX_SMALL_BLOCKS, pool_bytes // LEAST_BLOCK_BYTES)
    if blocks > most:
        rule = f"a pool of {pool_bytes} bytes may have {most}: {MAX_SMALL_BLOCKS}, or one for"
        _refuse("blocks over all arenas", blocks, f"{rule} each {LEAST_BLOCK_BYTES} bytes")


def _check_arenas(spec: CacheSpec) -> None:
    """Arenas lie apart, and the groups of one arena agree on which bytes a block id means."""
    extents = sorted(
        (view.offset, view.end, group.arena, f"groups[{index}]")
        for index, group in enumerate(spec.groups)
        for view in group.views
    )
    reach, owner, name = 0, 0, ""
    for offset, end, arena, field in extents:
        if arena != owner and offset < reach:
            _refuse(f"{field}.arena", arena, f"its bytes from {offset} overlap {name} of arena {owner}, up to {reach}")
        if end > reach:
            reach, owner, name = end, arena, field
    arenas: dict[int, list[tuple[str, Group]]] = {}
    for index, group in enumerate(spec.groups):
        if group.views:
            arenas.setdefault(group.arena, []).append((f"groups[{index}]", group))
    for shared in arenas.values():
        if len(shared) > 1:
            _check_pages(shared)


def _check_pages(shared: list[tuple[str, Group]]) -> None:
    """Block b of every group of an arena lies inside the pages numbered b, so ids of two groups never alias."""
    views = [view for _, group in shared for view in group.views]
    base = min(view.offset for view in views)
    page, blocks = views[0].block_stride, shared[0][1].num_blocks
    for field, group in shared:
        if group.num_blocks != blocks:
            _refuse(f"{field}.num_blocks", group.num_blocks, f"other groups of arena {group.arena} have {blocks}")
        for view in group.views:
            if view.block_stride != page:
                rule = f"other groups of arena {group.arena} have pages of {page} bytes"
                _refuse(f"{field}.views.{view.component}.block_stride", view.block_stride, rule)
            inside = 1 + sum((axis.size - 1) * axis.stride for axis in view.axes if axis.stride < page)
            outer = [axis.stride for axis in view.axes if axis.size > 1 and axis.stride >= page and axis.dim != "block"]
            frame = page * blocks
            start = (view.offset - base) % frame
            if start + inside > page or any(stride % frame for stride in outer):
                rule = f"its blocks straddle the pages of {page} bytes of arena {group.arena}"
                _refuse(f"{field}.views.{view.component}.offset", view.offset, rule)
