"""The block ids of a pool: which ones a worker may name, and which ones pulls write to. No two pulls share a block."""

from array import array
from collections.abc import Sequence

from kvd import limits
from kvd.errors import BadRequest, ErrorCode, Unavailable
from kvd.layout import CacheSpec
from kvd.plan import check_ids
from kvd.protocol.types import Span


def check_spans(spans: Sequence[Span], spec: CacheSpec) -> None:
    """Checks promise 5: a worker names only blocks of its own pool, each group once.

    Raises:
        BadRequest: `TOO_LARGE`, there are too many; `BAD_BLOCKS`, a group or an id is not in this pool, or named twice.

    """
    total = sum(len(span.ids) for span in spans) // 4
    if total > limits.MAX_BLOCKS_PER_REQUEST:
        text = f"{total} blocks in one request; the bound is {limits.MAX_BLOCKS_PER_REQUEST}"
        raise BadRequest(ErrorCode.TOO_LARGE, text)
    seen: set[int] = set()
    for span in spans:
        if span.group >= len(spec.groups) or span.group in seen:
            text = f"group {span.group} is named; there are {len(spec.groups)} groups, each of which may be named once"
            raise BadRequest(ErrorCode.BAD_BLOCKS, text)
        seen.add(span.group)
        if len(span.ids) % 4:
            text = f"the block ids of group {span.group} are {len(span.ids)} bytes, which is no multiple of 4"
            raise BadRequest(ErrorCode.BAD_BLOCKS, text)
        check_ids(spec.groups[span.group], span.ids)


class BusyBlocks:
    """The block ids in use, by arena: groups of one arena share memory, so equal ids in them are the same bytes."""

    def __init__(self, spec: CacheSpec) -> None:
        self._arena_of = [group.arena for group in spec.groups]
        self._busy: dict[int, set[int]] = {arena: set() for arena in self._arena_of}

    def take(self, spans: Sequence[Span]) -> None:
        """Marks the blocks of `spans` as in use, all or none.

        Raises:
            Unavailable: `BLOCKS_BUSY`, one belongs to a pull that has not ended, or is in quarantine.
            BadRequest: `BAD_BLOCKS`, one is named twice.

        """
        taken: dict[int, set[int]] = {}
        for span in spans:
            arena = self._arena_of[span.group]
            ids = set(array("I", span.ids))
            if not ids.isdisjoint(self._busy[arena]):
                block = min(ids & self._busy[arena])
                text = f"block {block} of group {span.group} belongs to a pull that has not ended or is in quarantine"
                raise Unavailable(ErrorCode.BLOCKS_BUSY, text)
            before = taken.setdefault(arena, set())
            if 4 * len(ids) != len(span.ids) or not ids.isdisjoint(before):
                twice = _first_twice([*before, *array("I", span.ids)])
                text = f"block {twice} is named twice, the second time by group {span.group}"
                raise BadRequest(ErrorCode.BAD_BLOCKS, text)
            before |= ids
        for arena, ids in taken.items():
            self._busy[arena] |= ids

    def give_back(self, spans: Sequence[Span]) -> None:
        """Frees the blocks of `spans`, which were taken together."""
        for span in spans:
            self._busy[self._arena_of[span.group]].difference_update(array("I", span.ids))

    @property
    def count(self) -> int:
        """How many blocks are in use."""
        return sum(len(busy) for busy in self._busy.values())


def _first_twice(ids: Sequence[int]) -> int:
    seen: set[int] = set()
    return next(block for block in ids if block in seen or seen.add(block))  # type: ignore[func-returns-value]
