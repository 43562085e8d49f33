"""The planner: made once from two specs, then turns block ids into descriptors for each request."""

from collections.abc import Sequence

import numpy as np

from kvd.errors import ErrorCode, refusal
from kvd.layout import CacheSpec
from kvd.limits import MAX_DESCRIPTORS
from kvd.plan.arrays import Copy, Descriptors, Ints, ascending, join
from kvd.plan.route import Share
from kvd.plan.template import Runs, Template, check_runs, check_units, make_templates
from kvd.plan.units import WHOLE, Pairing, Section, SpanPair, Units

FEW = 16
"""Plans of up to so many descriptors are made without arrays, which take longer (80 us if their code is cold)."""


class Planner:
    """Plans copies from one source rank's pool to one destination rank's.

    Made once for each peer. `source` and `destination` must be compatible (`check_compatible`); `share` is the
    destination's (`route`). The descriptors are the fewest that move each byte once: no two are adjacent on both sides.

    Raises:
        BadRequest: INCOMPATIBLE, if the orders differ so much that a block takes more than MAX_BLOCK_DESCRIPTORS, or
            block sizes so much that they are cut into more than MAX_ROUTE_UNITS.

    """

    def __init__(self, source: CacheSpec, destination: CacheSpec, share: Share) -> None:
        pairs = list(zip(source.groups, destination.groups, strict=True))
        shards = source.shard, destination.shard
        self._pairings = [Pairing(f"groups[{index}]", *groups, *shards) for index, groups in enumerate(pairs)]
        self._templates: list[tuple[Template, list[int]]] = []
        self.units = 0
        """How many units of blocks it has the places of."""
        runs = 0
        known: dict[tuple[object, ...], list[int]] = {}
        for group in range(len(pairs)):
            templates = make_templates(source, destination, share.parts, group)
            runs += sum(len(run.src) for template in templates for run in template.runs)
            check_runs("all groups", runs)
            for template in templates:
                members = known.setdefault(template.key, [])
                if not members:
                    self._templates.append((template, members))
                    self.units += template.units
                members.append(group)
            check_units("all groups", self.units)
        self.of_a_block = runs
        """How many descriptors one block takes, over all groups."""
        self._most = runs * max((pairing.units_per_block for pairing in self._pairings), default=1)
        """Descriptors of a block at most."""
        few = self._templates if self._most <= FEW else []
        self._few = [(template, template.offsets, groups) for template, groups in few]

    @property
    def groups(self) -> int:
        """How many groups the two layouts have, and a plan takes spans of."""
        return len(self._pairings)

    @property
    def strides(self) -> int:
        """How many different steps from block to block there are. Each takes its time, of however few blocks."""
        return len(self._templates)

    def most(self, blocks: int) -> int:
        """How many descriptors a plan has at most that fills so many destination blocks."""
        return self._most * blocks

    def plan(self, spans: Sequence[SpanPair], tokens: int | None = None, section: Section = WHOLE) -> Descriptors:
        """The descriptors that fill every destination block named, one span a group in the groups' order.

        With a `section` only what is new: plans of sections that follow each other move each byte once, and together
        those of a plan of the whole. What is wanted and not offered is noticed in the last one.

        With `tokens`, the length of the sequence, this also checks that everything needed of the wanted blocks is
        offered. A state group whose block sizes differ needs it.

        Raises:
            BadRequest: BAD_BLOCKS if a position is asked for and not offered, or the spans are not one a group;
                TOO_LARGE beyond MAX_DESCRIPTORS. Ids are taken as checked (`check_ids`).

        """
        if len(spans) != len(self._pairings):
            text = f"{len(spans)} spans for {len(self._pairings)} groups"
            raise refusal(ErrorCode.BAD_BLOCKS, text)
        if self._few and self._most * sum(len(span.destination_ids) for span in spans) <= FEW:
            return self._plan_few(spans, tokens, section)
        units = [pairing.units(span, tokens, section) for pairing, span in zip(self._pairings, spans, strict=True)]
        plan = _Plan()
        for template, groups in self._templates:
            plan.add(template, [units[group] for group in groups])
        return plan.descriptors()

    def _plan_few(self, spans: Sequence[SpanPair], tokens: int | None, section: Section) -> Descriptors:
        pairs = [pairing.pairs(span, tokens, section) for pairing, span in zip(self._pairings, spans, strict=True)]
        copies: list[Copy] = []
        for template, offsets, groups in self._few:
            for group in groups:
                for source, source_phase, destination, destination_phase in pairs[group]:
                    src = template.source.address(source, source_phase)
                    dst = template.destination.address(destination, destination_phase)
                    copies += [(src + there, dst + here, length) for there, here, length in offsets]
        return Descriptors.of(_joined(copies))


class _Plan:
    """Collects descriptors as arrays, and whether some may still be adjacent to each other."""

    def __init__(self) -> None:
        self._pieces: list[tuple[Ints, Ints, Ints]] = []
        self._extents: list[tuple[int, int, int, int]] = []
        self._count = 0
        self._joinable = False

    def add(self, template: Template, units: Sequence[Units]) -> None:
        """All runs of all `units`."""
        src, dst = _addresses(template, units)
        if not len(src):
            return
        if len(src) > 1:
            src, dst = _sorted(template, src, dst)
        extent = template.extent(src, dst)
        self._joinable |= any(_touch(extent, other) for other in self._extents)
        wraps = template.wraps
        self._joinable |= wraps is None or any(_has_distance(src, dst, wrap) for wrap in wraps)
        self._extents.append(extent)
        for run in template.runs:
            self._add_run(run, src, dst)

    def _add_run(self, run: Runs, src: Ints, dst: Ints) -> None:
        """Adds one run of every unit; neighbours on both sides become one."""
        length: Ints | int = run.length
        if len(src) > 1:
            apart = (src[1:] - src[:-1] != length) | (dst[1:] - dst[:-1] != length)
            starts = np.concatenate([_FIRST, np.flatnonzero(apart) + 1])
            if len(starts) < len(src):
                length = length * np.diff(np.concatenate([starts, [len(src)]]))
                src, dst = src[starts], dst[starts]
        self._count += len(src) * len(run.src)
        if self._count > MAX_DESCRIPTORS:
            text = f"a plan of at least {self._count} descriptors, the limit is {MAX_DESCRIPTORS}"
            raise refusal(ErrorCode.TOO_LARGE, text)
        lengths = np.empty((len(run.src), len(src)), dtype=np.int64)
        lengths[:] = length
        self._pieces.append((np.add.outer(run.src, src).ravel(), np.add.outer(run.dst, dst).ravel(), lengths.ravel()))

    def descriptors(self) -> Descriptors:
        """Everything added, with the last neighbours joined."""
        if not self._pieces:
            nothing = np.empty(0, dtype=np.uint64)
            return Descriptors(nothing, nothing, nothing)
        src, dst, length = self._pieces[0]
        if len(self._pieces) > 1:
            src, dst, length = (np.concatenate(arrays) for arrays in zip(*self._pieces, strict=True))
        if self._joinable:
            src, dst, length = join(src, dst, length)
        return Descriptors(src.view(np.uint64), dst.view(np.uint64), length.view(np.uint64))


_FIRST = np.zeros(1, dtype=np.int64)


def _joined(copies: list[Copy]) -> list[Copy]:
    """Like `kvd.plan.arrays.join`, for a few."""
    copies.sort()
    joined = copies[:1]
    for src, dst, length in copies[1:]:
        before_src, before_dst, before = joined[-1]
        if (src, dst) == (before_src + before, before_dst + before):
            joined[-1] = before_src, before_dst, before + length
        else:
            joined.append((src, dst, length))
    return joined


def _addresses(template: Template, units: Sequence[Units]) -> tuple[Ints, Ints]:
    """Addresses of all units on both sides, int64 [U] each."""
    src = [template.source.addresses(unit.source_ids, unit.source_phase) for unit in units]
    dst = [template.destination.addresses(unit.destination_ids, unit.destination_phase) for unit in units]
    if len(units) == 1:
        return src[0], dst[0]
    return np.concatenate(src), np.concatenate(dst)


def _sorted(template: Template, src: Ints, dst: Ints) -> tuple[Ints, Ints]:
    if np.all(src[1:] >= src[:-1]):
        return src, dst
    order = ascending(src, template.source.step)
    return src[order], dst[order]


def _has_distance(src: Ints, dst: Ints, distance: tuple[int, int]) -> bool:
    """Whether two units lie at `distance` on the source (ascending) and on the destination."""
    if src[-1] - src[0] < abs(distance[0]):
        return False
    sought = src + distance[0]
    places = np.searchsorted(src, sought)
    places[places == len(src)] = 0
    return bool(np.any((src[places] == sought) & (dst[places] == dst + distance[1])))


def _touch(extent: tuple[int, int, int, int], other: tuple[int, int, int, int]) -> bool:
    """Whether the two share or adjoin bytes on both sides, without which none of their runs can be joined."""
    src = extent[0] <= other[1] and other[0] <= extent[1]
    return src and extent[2] <= other[3] and other[2] <= extent[3]
