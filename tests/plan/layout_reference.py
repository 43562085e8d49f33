"""A slow, index-by-index account of which byte of which source belongs into which byte of a destination.

It shares nothing with the planner: it reads only the declared fields of specs, and walks every single index.
"""

import itertools
from dataclasses import dataclass

from kvd.layout import CacheSpec, Chunked, Full, Group, Shard, Sliding, State, View

Key = tuple[int, ...]


def attends(window, query: int, key: int) -> bool:
    """Whether token number `query` attends to token number `key`."""
    match window:
        case Full():
            return key <= query
        case Sliding(window=size):
            return query - size < key <= query
        case Chunked(chunk=size):
            return key <= query and key // size == query // size
    raise AssertionError(window)


def positions_needed(group: Group, tokens: int) -> list[int]:
    """Block positions that the next token, number `tokens`, reads or (for a state) continues from."""
    if isinstance(group.window, State):
        return [(tokens - 1) // group.block_tokens] if tokens else []
    return sorted({key // group.block_tokens for key in range(tokens) if attends(group.window, tokens, key)})


def held_heads(total: int, shard: Shard) -> list[int]:
    """Every head whose owners, dealt out in rank order, include this rank."""
    if total >= shard.tp_size:
        return [head for head in range(total) if head // (total // shard.tp_size) == shard.tp_rank]
    return [head for head in range(total) if head == shard.tp_rank // (shard.tp_size // total)]


def elements(view: View, shard: Shard, block: int):
    """All bytes of one block in one view: (layer, kv, head, token, tap, channel, byte) -> address."""
    heads = held_heads(view.heads, shard)
    axes = [axis for axis in view.axes if axis.dim != "block"]
    base = view.offset + sum(block * axis.stride for axis in view.axes if axis.dim == "block")
    for index in itertools.product(*(range(axis.size) for axis in axes)):
        at = dict.fromkeys(("layer", "kv", "head", "token", "tap", "channel", "byte"), 0)
        address = base
        for axis, i in zip(axes, index, strict=True):
            at[axis.dim] = at[axis.dim] * axis.size + i
            address += i * axis.stride
        at["layer"], at["head"] = view.layers[at["layer"]], heads[at["head"]]
        yield tuple(at.values()), address


@dataclass
class Blocks:
    """One group's blocks on one side: ids from position `first` on."""

    first: int
    ids: list[int]


def contents(spec: CacheSpec, blocks: list[Blocks], tokens: int) -> dict[tuple, int]:
    """Address of everything these blocks hold, by what it means: group, component, place in the sequence, indexes."""
    found: dict[tuple, int] = {}
    for number, (group, named) in enumerate(zip(spec.groups, blocks, strict=True)):
        for place, block in enumerate(named.ids):
            position = named.first + place
            for view in group.views:
                for key, address in elements(view, spec.shard, block):
                    layer, kv, head, token, tap, channel, byte = key
                    if isinstance(group.window, State):
                        if position != (tokens - 1) // group.block_tokens:
                            continue
                        token = tokens
                    else:
                        run = group.block_tokens // spec.shard.cp_size
                        token += position * group.block_tokens + spec.shard.tp_rank % spec.shard.cp_size * run
                    found[number, view.component, layer, kv, head, token, tap, channel, byte] = address
    return found


def mapping(
    sources: list[CacheSpec], source: list[Blocks], destination: CacheSpec, wanted: list[Blocks], tokens: int
) -> dict[int, dict[int, int]]:
    """For every destination byte to fill, the source ranks that have it and its address there."""
    offered = [contents(spec, source, tokens) for spec in sources]
    result: dict[int, dict[int, int]] = {}
    for key, address in contents(destination, wanted, tokens).items():
        holders = {rank: held[key] for rank, held in enumerate(offered) if key in held}
        if holders:
            result[address] = holders
    return result


def fewest_descriptors(copies: dict[int, int]) -> int:
    """How many runs, contiguous on both sides, a mapping of destination bytes to source bytes falls into."""
    return sum(copies.get(to - 1) != copies[to] - 1 for to in copies)
