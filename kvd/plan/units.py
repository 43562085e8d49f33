"""Units: which source blocks go to which destination blocks, by position in the sequence.

A unit is one block of the smaller block size; with context parallelism, the tokens of a block that lie on one rank.
Whole units move, so unfilled slots of a sequence's last unit move too; nobody reads them.
"""

from dataclasses import dataclass

import numpy as np

from kvd.errors import ErrorCode, refusal
from kvd.layout import Full, Group, Shard, State
from kvd.plan.arrays import Ids, Ints


@dataclass(frozen=True, slots=True)
class SpanPair:
    """One group's part of a transfer: blocks at consecutive positions of the sequence, on either side.

    `source_ids` (uint32 [S]) are the blocks offered from position `source_first`; `destination_ids` (uint32 [D]) are
    those to fill from position `destination_first`. Positions count blocks of their own side's size. Either may be a
    memoryview of that format (`I`).
    """

    source_first: int
    source_ids: Ids
    destination_first: int
    destination_ids: Ids


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the sequence, in tokens: what an offer that grows has had since its plan before this one.

    Of groups that attend to every token it has the units that end in it, `start` exclusive and `stop` inclusive, and of
    others nothing: those come with the last section. That one has no `stop`, and all that the ones before it left out.
    """

    start: int
    stop: int | None


WHOLE = Section(0, None)


@dataclass(frozen=True, slots=True)
class Units:
    """Pairs of units, int64 [U]: block ids and, where a block is several units, the unit's number in its block."""

    source_ids: Ints
    source_phase: Ints | None
    destination_ids: Ints
    destination_phase: Ints | None


Pair = tuple[int, int, int, int]
"""One unit: block id and the unit's number in its block, on the source and on the destination."""

_NONE = Units(np.empty(0, np.int64), None, np.empty(0, np.int64), None)


class Pairing:
    """Pairs the units of one group's spans between two ranks, whose `shards` say which of them lie there."""

    def __init__(self, name: str, source: Group, destination: Group, *shards: Shard) -> None:
        self._name = name
        self._source, self._destination = source, destination
        self._is_state = isinstance(source.window, State)
        held = [group.held_tokens(shard) for group, shard in zip((source, destination), shards, strict=True)]
        self._unit = unit = min(held)
        """Tokens of a unit."""
        self._ranks, self._rank = max((shard.cp_size, shard.cp_rank) for shard in shards)
        """Both sides hold one unit in so many, from the one with this number on: the side that deals its tokens out
        among more ranks decides, as the other one's number divides that (`check_compatible`)."""
        self._source_units = 1 if self._is_state else source.block_tokens // unit
        self._destination_units = 1 if self._is_state else destination.block_tokens // unit

    @property
    def units_per_block(self) -> int:
        """The units of a destination block that lie on this rank."""
        return 1 if self._ranks > 1 else self._destination_units

    def units(self, span: SpanPair, tokens: int | None, section: Section = WHOLE) -> Units:
        """The units of `span` in `section`, on both sides.

        Raises:
            BadRequest: BAD_BLOCKS, if a wanted position is not offered.

        """
        if not len(span.destination_ids):
            return _NONE
        span, low, high = self._section(span, tokens, section)
        if low >= high:
            return _NONE
        source_units, destination_units = self._source_units, self._destination_units
        source_first, destination_first = span.source_first, span.destination_first
        if source_units == destination_units and self._ranks == 1:
            source_ids = np.asarray(span.source_ids)[low - source_first : high - source_first]
            destination_ids = np.asarray(span.destination_ids)[low - destination_first : high - destination_first]
            return Units(source_ids.astype(np.int64), None, destination_ids.astype(np.int64), None)
        positions = np.arange(self._first(low), high, self._ranks)
        source_ids, source_phase = _unit_of_block(positions, source_units, source_first, span.source_ids)
        ids, phase = _unit_of_block(positions, destination_units, destination_first, span.destination_ids)
        if self._ranks > 1:  # of a block one unit lies on a rank
            source_phase = phase = None
        return Units(source_ids, source_phase, ids, phase)

    def pairs(self, span: SpanPair, tokens: int | None, section: Section = WHOLE) -> list[Pair]:
        """Like `units`, as tuples."""
        if not len(span.destination_ids):
            return []
        span, low, high = self._section(span, tokens, section)
        found = []
        for unit in range(self._first(low), high, self._ranks):
            source, source_phase = divmod(unit, self._source_units)
            destination, destination_phase = divmod(unit, self._destination_units)
            if self._ranks > 1:
                source_phase = destination_phase = 0
            source_id = int(span.source_ids[source - span.source_first])
            destination_id = int(span.destination_ids[destination - span.destination_first])
            found.append((source_id, source_phase, destination_id, destination_phase))
        return found

    def _first(self, low: int) -> int:
        """The first unit from `low` on that lies on these ranks."""
        return low + (self._rank - low) % self._ranks

    def _section(self, span: SpanPair, tokens: int | None, section: Section) -> tuple[SpanPair, int, int]:
        """The span to move, and its first and last + 1 position in `section`, counted in units."""
        if section.stop is None:
            span, low, high = self._range(span, tokens)
        elif isinstance(self._source.window, Full):
            low, high = self._overlap(span)
            high = min(high, section.stop // self._unit)
        else:
            return span, 0, 0
        if isinstance(self._source.window, Full):
            low = max(low, section.start // self._unit)
        return span, low, high

    def _overlap(self, span: SpanPair) -> tuple[int, int]:
        """The positions that are on both sides, first and last + 1, counted in units."""
        source_stop = span.source_first + len(span.source_ids)
        destination_stop = span.destination_first + len(span.destination_ids)
        low = max(span.source_first * self._source_units, span.destination_first * self._destination_units)
        high = min(source_stop * self._source_units, destination_stop * self._destination_units)
        return low, high

    def _range(self, span: SpanPair, tokens: int | None) -> tuple[SpanPair, int, int]:
        """The span to move, and its first and last + 1 position, counted in units."""
        if self._is_state and self._source.block_tokens != self._destination.block_tokens:
            span = self._last_state(span, tokens)
        destination_units, destination_first = self._destination_units, span.destination_first
        destination_stop = destination_first + len(span.destination_ids)
        low, high = self._overlap(span)
        if (
            low >= high
            or low // destination_units != destination_first
            or -(-high // destination_units) != destination_stop
            or (tokens is not None and not self._covers(span, tokens))
        ):
            self._refuse(span)
        return span, low, high

    def _covers(self, span: SpanPair, tokens: int) -> bool:
        """Whether the offered blocks hold all needed tokens of the wanted ones."""
        if self._is_state:
            return True
        size, offered = self._destination.block_tokens, self._source.block_tokens
        first = max(self._source.window.first_token(tokens), span.destination_first * size)
        stop = min(tokens, (span.destination_first + len(span.destination_ids)) * size)
        stop_offered = (span.source_first + len(span.source_ids)) * offered
        return first >= stop or (span.source_first * offered <= first and stop <= stop_offered)

    def _last_state(self, span: SpanPair, tokens: int | None) -> SpanPair:
        """The one block on each side that holds the state after `tokens`, where block sizes differ."""
        if tokens is None:
            text = f"{self._name}: states of different block_tokens need the number of tokens, which is missing"
            raise refusal(ErrorCode.BAD_BLOCKS, text)
        source_at = self._source.needed(tokens).start - span.source_first
        destination_at = self._destination.needed(tokens).start - span.destination_first
        if not (0 <= source_at < len(span.source_ids) and 0 <= destination_at < len(span.destination_ids)):
            self._refuse(span)
        return SpanPair(
            0,
            span.source_ids[source_at : source_at + 1],
            0,
            span.destination_ids[destination_at : destination_at + 1],
        )

    def _refuse(self, span: SpanPair) -> None:
        first, stop = span.destination_first, span.destination_first + len(span.destination_ids)
        offered = range(span.source_first, span.source_first + len(span.source_ids))
        raise refusal(
            ErrorCode.BAD_BLOCKS,
            f"{self._name}: positions {first} to {stop} of {self._destination.block_tokens} tokens are asked for, "
            f"{offered.start} to {offered.stop} of {self._source.block_tokens} tokens are offered",
        )


def _unit_of_block(positions: Ints, units: int, first: int, ids: Ids) -> tuple[Ints, Ints | None]:
    if units == 1:
        return np.asarray(ids)[positions - first].astype(np.int64), None
    blocks, phase = np.divmod(positions, units)
    return np.asarray(ids)[blocks - first].astype(np.int64), phase
