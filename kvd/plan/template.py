"""Templates: how one block of one layout becomes one block of another, computed once for each peer.

The smaller of the two block sizes is the unit. A unit of a group is a set of runs, each contiguous on both sides;
a run's addresses are those of the unit plus offsets that are the same for every unit. So a plan is one outer sum:
(addresses of the units) + (offsets of the runs).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from kvd.errors import ErrorCode, refusal
from kvd.layout import CacheSpec, Dim, Group, State, View
from kvd.limits import MAX_BLOCK_DESCRIPTORS, MAX_ROUTE_UNITS
from kvd.plan.arrays import Copy, Ints, join
from kvd.plan.route import Part

_OUTER: tuple[Dim, ...] = ("kv", "tap", "channel")
_MOST_PAIRS = 1 << 16  # ends and starts that may meet: some ms to look through
_MOST_WRAPS = 32  # each plan looks for each; sorting the plan is cheaper than looking for more


@dataclass(frozen=True, slots=True)
class Side:
    """How a unit is addressed on one side: block id * stride + phases[which unit of its block]."""

    stride: int
    packed: bytes
    """The phases, by which sides are compared."""
    phases: Ints = field(compare=False)
    """int64 [units of a block]: there may be as many as a block has tokens."""
    reach: int
    """The largest distance of two units' addresses."""
    step: int
    """The greatest common divisor of all addresses of units."""

    @classmethod
    def of(cls, view: View, phases: Ints, num_blocks: int) -> "Side":
        """The side of `view` in a group of so many blocks."""
        stride, packed = view.block_stride, phases.tobytes()
        reach = (num_blocks - 1) * stride + int(phases.max())
        step = math.gcd(stride, int(np.gcd.reduce(phases))) or 1
        return cls(stride, packed, np.frombuffer(packed, dtype=np.int64), reach, step)

    def address(self, block: int, phase: int) -> int:
        """Address of one unit."""
        return block * self.stride + self.phases.item(phase)

    def addresses(self, ids: Ints, phase: Ints | None) -> Ints:
        """Addresses of the units that are number `phase` of the blocks `ids` (None: of blocks that are one unit)."""
        return ids * self.stride if phase is None else ids * self.stride + self.phases[phase]


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of one length: source and destination offsets from their unit's address, int64 [M], and the length."""

    src: Ints
    dst: Ints
    length: int


@dataclass(frozen=True, slots=True)
class Template:
    """All runs of a unit whose addresses step alike on both sides.

    `bounds` is the extent of the unit at address 0: first and last+1 byte on the source, then on the destination.
    `wraps` are the distances (on the source, on the destination) of two units at which a run of the one continues in
    another run of the other, so that the two could be joined; None is not known, so that every plan must be joined.
    """

    source: Side
    destination: Side
    runs: tuple[Runs, ...]
    bounds: tuple[int, int, int, int]
    wraps: tuple[tuple[int, int], ...] | None

    def extent(self, src: Ints, dst: Ints) -> tuple[int, int, int, int]:
        """Like `bounds`, for all units at `src` (ascending) and `dst`."""
        low_src, high_src, low_dst, high_dst = self.bounds
        return int(src[0]) + low_src, int(src[-1]) + high_src, int(dst.min()) + low_dst, int(dst.max()) + high_dst

    @property
    def offsets(self) -> list[Copy]:
        """The runs, one by one."""
        return [
            (src, dst, run.length)
            for run in self.runs
            for src, dst in zip(run.src.tolist(), run.dst.tolist(), strict=True)
        ]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for groups whose units are copied alike, which can be planned as one."""
        offsets = tuple((run.length, run.src.tobytes(), run.dst.tobytes()) for run in self.runs)
        return self.source, self.destination, offsets

    @property
    def units(self) -> int:
        """How many units a block is cut into on both sides together, each of which has a phase."""
        return len(self.source.phases) + len(self.destination.phases)


def check_runs(what: str, count: int, most: int = MAX_BLOCK_DESCRIPTORS) -> None:
    """Refuses a pair of layouts if one block of `what` takes too many descriptors, `count`.

    Raises:
        BadRequest: INCOMPATIBLE, beyond `most`.

    """
    if count > most:
        text = f"{what}: one block would take {count} descriptors, the limit is {most}"
        raise refusal(ErrorCode.INCOMPATIBLE, f"{text}; choose layouts that agree on the order of heads and tokens")


def check_units(what: str, count: int) -> None:
    """Refuses pairs of layouts if `what` is cut into too many units, `count`.

    Raises:
        BadRequest: INCOMPATIBLE, beyond MAX_ROUTE_UNITS.

    """
    if count > MAX_ROUTE_UNITS:
        text = f"{what}: blocks would be cut into {count} units, the limit is {MAX_ROUTE_UNITS}"
        raise refusal(ErrorCode.INCOMPATIBLE, f"{text}; choose layouts whose block sizes differ less")


def make_templates(source: CacheSpec, destination: CacheSpec, parts: Iterable[Part], group: int) -> list[Template]:
    """The templates of group number `group` for the `parts` of it that are read.

    Raises:
        BadRequest: INCOMPATIBLE, if a unit of one component falls into too many runs (`check_runs`), or the group into
            too many units (`check_units`).

    """
    ours, theirs = source.groups[group], destination.groups[group]
    unit = min(ours.held_tokens(source.shard), theirs.held_tokens(destination.shard))
    tokens = 1 if isinstance(ours.window, State) else unit
    found: dict[tuple[Side, Side], list[tuple[Ints, Ints, Ints]]] = {}
    wanted = {(view.component, layer): view for view in theirs.views for layer in view.layers}
    units = 0
    for part in parts:
        for view in ours.views:
            if (group, view.component, view.heads) != (part.group, part.component, part.total):
                continue
            for other, layers in _meetings(view, wanted):
                sides = _side(ours, unit, view), _side(theirs, unit, other)
                if sides not in found:
                    units += sum(len(side.phases) for side in sides)
                    check_units(f"groups[{group}]", units)
                cut = _Cut(view, source.shard.heads(view.heads), other, destination.shard.heads(other.heads))
                found.setdefault(sides, []).append(cut.runs(layers, part.heads, tokens))
    return [_template(sides, runs) for sides, runs in found.items()]


def _meetings(view: View, wanted: dict[tuple[str, int], View]) -> list[tuple[View, list[int]]]:
    """The views of the other side that share layers with `view`, and which."""
    found: dict[int, tuple[View, list[int]]] = {}
    for layer in sorted(view.layers):
        other = wanted.get((view.component, layer))
        if other is not None:
            found.setdefault(id(other), (other, []))[1].append(layer)
    return list(found.values())


def _side(group: Group, unit: int, view: View) -> Side:
    phases = np.zeros(1, dtype=np.int64) if isinstance(group.window, State) else _offsets(view, "token")[::unit]
    return Side.of(view, phases, group.num_blocks)


def _offsets(view: View, dim: Dim) -> Ints:
    """Byte offset of each coordinate of `dim`, with the others 0, int64 [size]; `[0]` if the view lacks it."""
    offsets = np.zeros(1, dtype=np.int64)
    for axis in view.axes:
        if axis.dim == dim:
            offsets = np.add.outer(offsets, np.arange(axis.size, dtype=np.int64) * axis.stride).ravel()
    return offsets


def _places(view: View, layers: list[int]) -> list[int]:
    places = {layer: place for place, layer in enumerate(view.layers)}
    return [places[layer] for layer in layers]


@dataclass(frozen=True, slots=True)
class _Cut:
    """Two views of one component, and the global heads that each holds."""

    source: View
    source_heads: range
    destination: View
    destination_heads: range

    def runs(self, layers: list[int], heads: range, tokens: int) -> tuple[Ints, Ints, Ints]:
        """Source offsets, destination offsets and lengths, int64 [M], of one unit of `tokens` tokens."""
        pairs = [self._offsets(dim) for dim in _OUTER]
        pairs.append(self._offsets("token", range(tokens), range(tokens)))
        pairs.append(
            self._offsets(
                "head",
                [head - self.source_heads.start for head in heads],
                [head - self.destination_heads.start for head in heads],
            )
        )
        pairs.append(
            self._offsets(
                "layer",
                _places(self.source, layers),
                _places(self.destination, layers),
            )
        )
        src = np.array([self.source.offset + sum(ours[0] for ours, _ in pairs)], dtype=np.int64)
        dst = np.array([self.destination.offset + sum(theirs[0] for _, theirs in pairs)], dtype=np.int64)
        length = self._absorb(pairs)
        count = reduce(lambda product, pair: product * len(pair[0]), pairs, 1)
        check_runs(self.source.component, count)
        for ours, theirs in pairs:
            src, dst = np.add.outer(src, ours - ours[0]).ravel(), np.add.outer(dst, theirs - theirs[0]).ravel()
        return src, dst, np.full(len(src), length, dtype=np.int64)

    def _offsets(
        self, dim: Dim, ours: Iterable[int] | None = None, theirs: Iterable[int] | None = None
    ) -> tuple[Ints, Ints]:
        src, dst = _offsets(self.source, dim), _offsets(self.destination, dim)
        if ours is not None and theirs is not None:
            src, dst = src[list(ours)], dst[list(theirs)]
        return src, dst

    def _absorb(self, pairs: list[tuple[Ints, Ints]]) -> int:
        """Removes dimensions that are contiguous on both sides from `pairs`; returns the bytes of a run with them."""
        length = self.source.size("byte")
        while True:
            for index, (src, dst) in enumerate(pairs):
                if np.all(np.diff(src) == length) and np.all(np.diff(dst) == length):
                    length *= len(src)
                    del pairs[index]
                    break
            else:
                return length


def _template(sides: tuple[Side, Side], found: list[tuple[Ints, Ints, Ints]]) -> Template:
    src, dst, length = join(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))
    runs = []
    for size in np.unique(length).tolist():
        chosen = length == size
        runs.append(Runs(src[chosen], dst[chosen], size))
    bounds = int(src.min()), int((src + length).max()), int(dst.min()), int((dst + length).max())
    return Template(*sides, tuple(runs), bounds, _wraps(sides, src, dst, length))


def _wraps(sides: tuple[Side, Side], src: Ints, dst: Ints, length: Ints) -> tuple[tuple[int, int], ...] | None:
    """All distances of two units at which one run continues in another; None if there are too many to look for.

    A run's end can be a start in another unit only where both leave the same remainders modulo what addresses of units
    are multiples of, and only within reach. Distinct units lie apart on both sides, so distances of 0 are none.
    """
    if not all(side.reach for side in sides):
        return ()
    labels = _labels(
        [np.concatenate([at + length, at]) % side.step for side, at in zip(sides, (src, dst), strict=True)]
    )
    ended, started = labels[: len(src)], labels[len(src) :]
    order = np.argsort(started)
    low = np.searchsorted(started[order], ended)
    counts = np.searchsorted(started[order], ended, side="right") - low
    pairs = int(counts.sum())
    if pairs > _MOST_PAIRS:
        return None
    ends = np.repeat(np.arange(len(src)), counts)
    starts = order[np.arange(pairs) + np.repeat(low + counts - np.cumsum(counts), counts)]
    between = [at[ends] + length[ends] - at[starts] for at in (src, dst)]
    possible = ends != starts
    for side, distance in zip(sides, between, strict=True):
        possible &= (distance != 0) & (np.abs(distance) <= side.reach)
    found = set(zip(*(distance[possible].tolist() for distance in between), strict=True))
    return tuple(sorted(found)) if len(found) <= _MOST_WRAPS else None


def _labels(remainders: Sequence[Ints]) -> Ints:
    """A number for each column of `remainders`, equal for equal columns."""
    ours, theirs = (np.unique(row, return_inverse=True)[1] for row in remainders)
    labels: Ints = ours * (int(theirs.max()) + 1) + theirs
    return labels
