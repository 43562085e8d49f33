"""Templates: how one block of one layout becomes one block of another, worked out once a peer.

The smaller of the two block sizes is the unit. A unit of a group is a set of runs, each contiguous on both sides;
a run's addresses are those of the unit plus offsets that are the same for every unit. So a plan is one outer sum:
(addresses of the units) + (offsets of the runs).
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import numpy as np

from kvd.errors import BadRequest, ErrorCode
from kvd.layout import CacheSpec, Dim, Group, State, View
from kvd.limits import MAX_DESCRIPTORS
from kvd.plan.arrays import Ints, join
from kvd.plan.route import Part

_OUTER: tuple[Dim, ...] = ("kv", "tap", "channel")


@dataclass(frozen=True, slots=True)
class Side:
    """How a unit is addressed on one side: block id * stride + phases[which unit of its block]."""

    stride: int
    phases: tuple[int, ...]
    num_blocks: int

    @property
    def reach(self) -> int:
        """The largest distance of two units' addresses."""
        return (self.num_blocks - 1) * self.stride + max(self.phases)

    @property
    def step(self) -> int:
        """The largest number of bytes that all addresses of units are multiples of."""
        return math.gcd(self.stride, *self.phases) or 1

    def addresses(self, ids: Ints, phase: Ints | None) -> Ints:
        """Addresses of the units that are number `phase` of the blocks `ids` (None: of blocks that are one unit)."""
        return ids * self.stride if phase is None else ids * self.stride + np.array(self.phases)[phase]


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
    another run of the other, so that the two could be joined.
    """

    source: Side
    destination: Side
    runs: tuple[Runs, ...]
    bounds: tuple[int, int, int, int]
    wraps: tuple[tuple[int, int], ...]

    def extent(self, src: Ints, dst: Ints) -> tuple[int, int, int, int]:
        """As `bounds`, of the runs of all units at `src` (ascending) and `dst`."""
        low_src, high_src, low_dst, high_dst = self.bounds
        return int(src[0]) + low_src, int(src[-1]) + high_src, int(dst.min()) + low_dst, int(dst.max()) + high_dst

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for groups whose units are copied alike, so that they can be planned as one."""
        offsets = tuple((run.length, run.src.tobytes(), run.dst.tobytes()) for run in self.runs)
        return self.source, self.destination, offsets


def make_templates(source: CacheSpec, destination: CacheSpec, parts: Iterable[Part], group: int) -> list[Template]:
    """The templates of group number `group` for the `parts` of it that are read.

    Raises:
        BadRequest: INCOMPATIBLE, if a unit falls into more runs than a whole plan may have.

    """
    ours, theirs = source.groups[group], destination.groups[group]
    tokens = 1 if isinstance(ours.window, State) else min(ours.block_tokens, theirs.block_tokens)
    found: dict[tuple[Side, Side], list[tuple[Ints, Ints, Ints]]] = {}
    for part in parts:
        held = [view for view in ours.views if (group, view.component) == (part.group, part.component)]
        wanted = [view for view in theirs.views if (group, view.component) == (part.group, part.component)]
        for view, other in itertools.product(held, wanted):
            layers = sorted(set(view.layers).intersection(other.layers))
            if layers:
                sides = _side(ours, theirs, view), _side(theirs, ours, other)
                cut = _Cut(view, source.shard.heads(view.heads), other, destination.shard.heads(other.heads))
                found.setdefault(sides, []).append(cut.runs(layers, part.heads, tokens))
    return [_template(sides, runs) for sides, runs in found.items()]


def _side(group: Group, other: Group, view: View) -> Side:
    if isinstance(group.window, State):
        return Side(view.block_stride, (0,), group.num_blocks)
    unit = min(group.block_tokens, other.block_tokens)
    return Side(view.block_stride, tuple(view.offsets("token")[::unit]), group.num_blocks)


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
                [self.source.layers.index(layer) for layer in layers],
                [self.destination.layers.index(layer) for layer in layers],
            )
        )
        src = np.array([self.source.offset + sum(ours[0] for ours, _ in pairs)], dtype=np.int64)
        dst = np.array([self.destination.offset + sum(theirs[0] for _, theirs in pairs)], dtype=np.int64)
        length = self._absorb(pairs)
        count = reduce(lambda product, pair: product * len(pair[0]), pairs, 1)
        if count > MAX_DESCRIPTORS:
            text = f"{self.source.component}: a block would take {count} descriptors, the limit is {MAX_DESCRIPTORS}"
            raise BadRequest(ErrorCode.INCOMPATIBLE, text)
        for ours, theirs in pairs:
            src, dst = np.add.outer(src, ours - ours[0]).ravel(), np.add.outer(dst, theirs - theirs[0]).ravel()
        return src, dst, np.full(len(src), length, dtype=np.int64)

    def _offsets(
        self, dim: Dim, ours: Iterable[int] | None = None, theirs: Iterable[int] | None = None
    ) -> tuple[Ints, Ints]:
        src = np.array(self.source.offsets(dim), dtype=np.int64)
        dst = np.array(self.destination.offsets(dim), dtype=np.int64)
        if ours is not None and theirs is not None:
            src, dst = src[list(ours)], dst[list(theirs)]
        return src, dst

    def _absorb(self, pairs: list[tuple[Ints, Ints]]) -> int:
        """Take out of `pairs` the dimensions that are contiguous on both sides; the bytes of a run with them."""
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


def _wraps(sides: tuple[Side, Side], src: Ints, dst: Ints, length: Ints) -> tuple[tuple[int, int], ...]:
    """All distances of two units over which one run (sorted by `src`) continues in another.

    A run's end can be a start in another unit only where both leave the same remainders modulo what addresses of units
    are multiples of, and only within reach. Distinct units lie apart on both sides, so distances of 0 are none.
    """
    steps = np.array([side.step for side in sides])
    ends = np.stack([src + length, dst + length], axis=1)
    starts = np.stack([src, dst], axis=1)
    _, labels = np.unique(np.concatenate([ends % steps, starts % steps]), axis=0, return_inverse=True)
    end_labels, start_labels = labels[: len(src)], labels[len(src) :]
    found: set[tuple[int, int]] = set()
    for label in np.intersect1d(end_labels, start_labels).tolist():
        ended, started = np.flatnonzero(end_labels == label), np.flatnonzero(start_labels == label)
        low = np.searchsorted(src[started], ends[ended, 0] - sides[0].reach)
        high = np.searchsorted(src[started], ends[ended, 0] + sides[0].reach, side="right")
        for nudge in range(int((high - low).max())):
            near = low + nudge < high
            one, other = ended[near], started[(low + nudge)[near]]
            steps_between = (ends[one] - starts[other])[one != other]
            possible = np.all((steps_between != 0) & (np.abs(steps_between) <= [side.reach for side in sides]), axis=1)
            found.update(map(tuple, np.unique(steps_between[possible], axis=0).tolist()))
    return tuple(sorted(found))
