"""What a transfer would move, from two engines' specs and a number of tokens: the figures of `kvd plan`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvd.errors import ErrorCode, refusal
from kvd.layout import CacheSpec, Full, Group, State
from kvd.plan.align import align
from kvd.plan.compat import check_compatible
from kvd.plan.planner import Planner
from kvd.plan.route import route
from kvd.plan.units import SpanPair

IdOrder: TypeAlias = Literal["scattered", "adjacent"]


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """What one group moves into one destination rank. Positions and blocks are the destination's, sizes are bytes."""

    window: str
    layers: int
    block_tokens: int
    first_position: int
    blocks: int
    bytes: int
    bytes_as_full: int
    descriptors: int
    largest: int
    smallest: int


@dataclass(frozen=True, slots=True)
class Figures:
    """What one destination rank moves. `bytes_as_full` is the same with full attention in place of every window.

    `descriptors` may be below the sum over groups, where neighbours of different groups are joined. `sources` are the
    ranks read, `readers` is how many ranks of the consumer read each source rank.
    """

    tokens: int
    bytes: int
    bytes_as_full: int
    descriptors: int
    largest: int
    smallest: int
    sources: tuple[int, ...]
    readers: tuple[int, ...]
    groups: tuple[GroupFigures, ...]


def explain(sources: Sequence[CacheSpec], destination: CacheSpec, tokens: int, ids: IdOrder = "scattered") -> Figures:
    """The figures of moving all that `destination` needs at `tokens` tokens, with nothing cached there before.

    Block ids are either "adjacent" (ascending on both sides) or "scattered" (no two blocks are neighbours on both).

    Raises:
        BadRequest: INCOMPATIBLE, as `check_compatible` and `route`; BAD_BLOCKS if a pool has too few blocks.

    """
    aligned = [align(source, destination) for source in sources]
    for pair in aligned:
        check_compatible(*pair)
    found = route([source for source, _ in aligned], destination)
    planners = [Planner(*aligned[share.source], share) for share in found.shares]
    pairs = list(zip(sources[0].groups, destination.groups, strict=True))
    offered, wanted = _tables("source", sources[0], tokens), _tables("destination", destination, tokens)
    if ids == "scattered":
        wanted = [(first, table[::-1]) for first, table in wanted]
    spans = [SpanPair(*source, *table) for source, table in zip(offered, wanted, strict=True)]
    lengths = [planner.plan(spans, tokens).length for planner in planners]
    groups = []
    for index, (ours, theirs) in enumerate(pairs):
        alone = [span if index == other else _empty(span) for other, span in enumerate(spans)]
        moved = np.concatenate([planner.plan(alone, tokens).length for planner in planners])
        groups.append(_group_figures(ours, theirs, tokens, moved))
    everything = np.concatenate(lengths)
    return Figures(
        tokens=tokens,
        bytes=int(everything.sum()),
        bytes_as_full=sum(group.bytes_as_full for group in groups),
        descriptors=len(everything),
        largest=int(everything.max(initial=0)),
        smallest=int(everything.min()) if len(everything) else 0,
        sources=tuple(sources[share.source].shard.rank for share in found.shares),
        readers=found.readers,
        groups=tuple(groups),
    )


def _group_figures(ours: Group, theirs: Group, tokens: int, moved: NDArray[np.uint64]) -> GroupFigures:
    needed = theirs.needed(tokens)
    return GroupFigures(
        window=_window_name(theirs),
        layers=len({layer for view in theirs.views for layer in view.layers}),
        block_tokens=theirs.block_tokens,
        first_position=needed.start,
        blocks=len(needed),
        bytes=int(moved.sum()),
        bytes_as_full=_bytes_as_full(ours, theirs, tokens),
        descriptors=len(moved),
        largest=int(moved.max(initial=0)),
        smallest=int(moved.min()) if len(moved) else 0,
    )


def _bytes_as_full(ours: Group, theirs: Group, tokens: int) -> int:
    """What the group would move without its window; a state stays a state."""
    if isinstance(theirs.window, State):
        return theirs.block_bytes * len(theirs.needed(tokens))
    unit = min(ours.block_tokens, theirs.block_tokens)
    return len(Full().needed(tokens, unit)) * unit * theirs.block_bytes // theirs.block_tokens


def _window_name(group: Group) -> str:
    fields = [str(getattr(group.window, name)) for name in group.window.__struct_fields__]
    return " ".join([type(group.window).__name__.lower(), *fields])


def _tables(side: str, spec: CacheSpec, tokens: int) -> list[tuple[int, NDArray[np.uint32]]]:
    """For every group its first needed position and ascending block ids from there; no id twice in an arena."""
    used: dict[int, int] = {}
    tables = []
    for group in spec.groups:
        needed, first = group.needed(tokens), used.get(group.arena, 0)
        used[group.arena] = first + len(needed)
        if used[group.arena] > group.num_blocks:
            text = f"{side}: {tokens} tokens need {used[group.arena]} blocks, num_blocks = {group.num_blocks}"
            raise refusal(ErrorCode.BAD_BLOCKS, text)
        tables.append((needed.start, np.arange(first, used[group.arena], dtype=np.uint32)))
    return tables


def _empty(span: SpanPair) -> SpanPair:
    return SpanPair(span.source_first, span.source_ids[:0], span.destination_first, span.destination_ids[:0])
