"""Pools as actors pass them on, ours and those of peers; and of ours, which blocks are in use and what these stand for.

No pull writes to blocks of another pull or of an offer. The garbage collector tracks no pool.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvd import limits
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.layout import CacheSpec, Full, Group
from kvd.plan import check_ids
from kvd.protocol.peer import Grant
from kvd.protocol.ticket import TicketRank
from kvd.protocol.types import Span

_PULLED: Final = "belongs to a pull that has not ended or is in quarantine"


class Size(NamedTuple):
    """Of the blocks that one offer or pull names; a block that two of them name is in both."""

    blocks: int
    bytes: int


def check_spans(spans: Sequence[Span], spec: CacheSpec) -> None:
    """Checks promise 5: a worker names only blocks of its own pool, each group once.

    Raises:
        BadRequest: `TOO_LARGE`, there are too many; `BAD_BLOCKS`, a group or an id is not in this pool, or named twice.

    """
    total = _count(spans)
    if total > limits.MAX_BLOCKS_PER_REQUEST:
        text = f"{total} blocks in one request; the bound is {limits.MAX_BLOCKS_PER_REQUEST}"
        raise refusal(ErrorCode.TOO_LARGE, text)
    seen: set[int] = set()
    for span in spans:
        if span.group >= len(spec.groups) or span.group in seen:
            text = f"group {span.group} is named; there are {len(spec.groups)} groups, each of which may be named once"
            raise refusal(ErrorCode.BAD_BLOCKS, text)
        seen.add(span.group)
        if len(span.ids) % 4:
            text = f"the block ids of group {span.group} are {len(span.ids)} bytes, which is no multiple of 4"
            raise refusal(ErrorCode.BAD_BLOCKS, text)
        check_ids(spec.groups[span.group], span.ids)


def check_complete(stops: Mapping[int, int], tokens: int, groups: Sequence[Group]) -> None:
    """Checks that `tokens` tokens can be complete: groups that attend to every token have blocks for them.

    `stops` has the position behind the last block of each group.

    Raises:
        BadRequest: `BAD_BLOCKS`, one has not.

    """
    for number, group in enumerate(groups):
        held = stops.get(number, 0) * group.block_tokens
        if isinstance(group.window, Full) and held < tokens:
            text = f"{tokens} tokens are said to be complete, the blocks of group {number} hold {held}"
            raise refusal(ErrorCode.BAD_BLOCKS, text)


_WRITTEN: Final = -1
_FEW: Final = 64
"""Blocks up to which a loop takes less time than calls of numpy, 7 us."""
_MANY: Final = 8192
"""Blocks of one call of numpy: what it makes of them stays in the cache, and takes no new pages."""


class Uses:
    """Of each block either that a pull writes to it, or in how many offers it stands, in 4 bytes.

    One request may name hundreds of thousands of blocks.
    Block ids come as they are on the wire, little-endian u32, and are below `blocks`.
    """

    def __init__(self, blocks: int) -> None:
        self._uses = np.zeros(blocks, dtype=np.int32)  # a page of it takes memory once a block there is named
        self._one = self._uses.data

    def write(self, ids: bytes) -> int | None:
        """Marks free blocks as written to.

        If one is used, or named twice, nothing is marked, and it is returned.
        """
        few = len(ids) <= 4 * _FEW
        block, marked = self._write_few(ids) if few else self._write_many(ids)
        if block is not None:
            self.free(ids[: 4 * marked])
        return block

    def _write_few(self, ids: bytes) -> tuple[int | None, int]:
        """A block that cannot be marked, and how many are marked."""
        blocks = array("I", ids)
        for count, block in enumerate(blocks):
            if self._one[block]:
                return block, count
            self._one[block] = _WRITTEN
        return None, len(blocks)

    def _write_many(self, ids: bytes) -> tuple[int | None, int]:
        count, uses = 0, self._uses
        for blocks in _indexes(ids):
            used = uses[blocks] != 0
            if used.any():
                return int(blocks[used.argmax()]), count
            numbers = np.arange(1, len(blocks) + 1, dtype=np.int32)
            uses[blocks] = numbers
            overwritten = uses[blocks] != numbers  # by another number, as the block is named again
            count += len(blocks)
            if overwritten.any():
                return int(blocks[overwritten.argmax()]), count
            uses[blocks] = _WRITTEN
        return None, count

    def free(self, ids: bytes) -> None:
        """Nothing writes to these blocks any more."""
        for blocks in _indexes(ids):
            self._uses[blocks] = 0

    def offer(self, ids: bytes, change: int) -> None:
        """Counts one offer of these blocks more, or one less."""
        if len(ids) <= 4 * _FEW:
            for block in array("I", ids):
                self._one[block] += change
            return
        for blocks in _indexes(ids):
            np.add.at(self._uses, blocks, np.int32(change))

    def first_written(self, ids: bytes) -> int | None:
        """The first of these blocks that a pull writes to."""
        if len(ids) <= 4 * _FEW:
            return next((block for block in array("I", ids) if self._one[block] == _WRITTEN), None)
        for blocks in _indexes(ids):
            written = self._uses[blocks] == _WRITTEN
            if written.any():
                return int(blocks[written.argmax()])
        return None

    def is_free(self, block: int) -> bool:
        """Whether no pull writes to it, and it stands in no offer."""
        return self._one[block] == 0

    def is_offered(self, block: int) -> bool:
        """Whether it stands in an offer."""
        return self._one[block] > 0


def _indexes(ids: bytes) -> Iterator[NDArray[np.intp]]:
    """Some blocks at a time, in the one type of indexes that numpy does not convert one by one."""
    blocks = np.frombuffer(ids, dtype="<u4")
    for first in range(0, len(blocks), _MANY):
        yield blocks[first : first + _MANY].astype(np.intp)


class BlocksInUse:
    """The block ids of a pool that pulls write to, and those that stand in offers: none is both.

    By arena: groups of one arena share memory, so equal ids in them are the same bytes. The scheduler and the leases
    share this table: if each asked the other, both could say yes at once.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self._arena_of = [group.arena for group in spec.groups]
        self._block_bytes = [group.block_bytes for group in spec.groups]
        self._uses = {arena: Uses(blocks) for arena, blocks in spec.arenas.items()}
        self._written = 0
        """Blocks that are written to."""
        self._named = 0
        """Block ids in all offers that stand."""

    def size_of(self, spans: Sequence[Span]) -> Size:
        """How much the blocks of `spans` are."""
        blocks = size = 0
        for span in spans:
            count = len(span.ids) // 4
            blocks += count
            size += count * self._block_bytes[span.group]
        return Size(blocks, size)

    # --- pulls ------------------------------------------------------------------------------------------------------

    def take(self, spans: Sequence[Span]) -> None:
        """Marks the blocks of `spans` as written to, all or none.

        Raises:
            Unavailable: `BLOCKS_BUSY`, one belongs to a pull that has not ended, is in quarantine, or is offered.
            BadRequest: `BAD_BLOCKS`, one is named twice.

        """
        for count, span in enumerate(spans):
            block = self._of(span).write(span.ids)
            if block is not None:
                self._free(spans[:count])
                raise self._busy(span, block)
        self._written += _count(spans)

    def _busy(self, span: Span, block: int) -> KvdError:
        """Why a block of a pull that takes nothing cannot be taken."""
        uses = self._of(span)
        if uses.is_free(block):
            text = f"block {block} is named twice, the second time by group {span.group}"
            return refusal(ErrorCode.BAD_BLOCKS, text)
        how = "stands in an offer, which must be released first" if uses.is_offered(block) else _PULLED
        return refusal(ErrorCode.BLOCKS_BUSY, f"block {block} of group {span.group} {how}")

    def give_back(self, spans: Sequence[Span]) -> None:
        """Frees the blocks of `spans`, which were taken together."""
        self._free(spans)
        self._written -= _count(spans)

    def _free(self, spans: Sequence[Span]) -> None:
        for span in spans:
            self._of(span).free(span.ids)

    def _of(self, span: Span) -> Uses:
        return self._uses[self._arena_of[span.group]]

    @property
    def busy(self) -> int:
        """How many blocks are written to."""
        return self._written

    # --- offers -----------------------------------------------------------------------------------------------------

    def offer(self, spans: Sequence[Span]) -> None:
        """Marks the blocks of `spans` as offered, all or none, once more if they stand in offers already.

        Raises:
            Unavailable: `BLOCKS_BUSY`, one belongs to a pull that has not ended, or is in quarantine; `OVERLOADED`, too
                many are offered.

        """
        named = self._named + _count(spans)
        if named > limits.MAX_OFFERED_BLOCKS:
            text = f"with this offer {named} block ids of this worker would be offered, the bound is"
            text += f" {limits.MAX_OFFERED_BLOCKS}; wait until some are released"
            raise refusal(ErrorCode.OVERLOADED, text)
        for span in spans if self._written else ():
            block = self._of(span).first_written(span.ids)
            if block is not None:
                raise refusal(ErrorCode.BLOCKS_BUSY, f"block {block} of group {span.group} {_PULLED}")
        for span in spans:
            self._of(span).offer(span.ids, +1)
        self._named = named

    def release(self, spans: Sequence[Span]) -> None:
        """One offer of the blocks of `spans` has ended."""
        self._named -= _count(spans)
        for span in spans:
            self._of(span).offer(span.ids, -1)


def _count(spans: Sequence[Span]) -> int:
    return sum(len(span.ids) for span in spans) // 4


class Hold(StrEnum):
    """What blocks stand for."""

    OFFERED = "offered"
    """an offer that nobody has claimed, or that nobody claims just now"""
    CLAIMED = "claimed"
    """an offer that at least one reader claims"""
    OVERDUE = "overdue"
    """an offer whose time is over, and that lasts until its last claim ends"""
    PULLING = "pulling"
    """a pull that has not ended writes to them"""
    QUARANTINED = "quarantined"
    """a pull has ended, and its reads have not: they may still be written to"""


NOTHING: Final = Size(0, 0)


class HeldBlocks:
    """How much is in each of the states `holds`, which this one alone counts."""

    def __init__(self, holds: tuple[Hold, ...]) -> None:
        self._holds = holds
        self._sizes: dict[Hold, Size] = {}

    def move(self, size: Size, before: Hold | None, after: Hold | None) -> None:
        """Counts blocks in another state; None stands for blocks that are held no more, or not yet."""
        if not size.blocks:
            return
        if before is not None:
            blocks, total = self._sizes[before]
            if blocks == size.blocks:
                del self._sizes[before]
            else:
                self._sizes[before] = Size(blocks - size.blocks, total - size.bytes)
        if after is not None:
            blocks, total = self._sizes.get(after, NOTHING)
            self._sizes[after] = Size(blocks + size.blocks, total + size.bytes)

    def of(self, hold: Hold) -> Size:
        """How much is in one of the states."""
        return self._sizes.get(hold, NOTHING)

    def report(self) -> dict[str, int]:
        """Blocks by state, as a status tells of them."""
        return {hold.value: self.of(hold).blocks for hold in self._holds}


class Pool(Struct, frozen=True, gc=False):
    """A pool of this daemon, registered with the transport. `base` is an address, `size` bytes."""

    id: int
    name: str
    """That of the worker that it is lent to, and of its successors."""
    epoch: int
    base: int
    size: int
    spec: CacheSpec
    raw_spec: bytes
    blocks: BlocksInUse
    uid: int
    """The user that it belongs to."""


class PeerPool(Struct, frozen=True, gc=False):
    """A pool of a peer."""

    epoch: int
    base: int
    size: int
    spec: CacheSpec


class PeerView(Struct, frozen=True, gc=False):
    """A peer that is ready: its transport agent and its pools by name."""

    address: str
    daemon: str
    incarnation: int
    agent: str
    pools: Mapping[str, PeerPool]
    same_host: bool = False
    """Whether its transport has no part in reads from it."""
    stamps: int = 0
    """Address of its first stamp; 0 if it has none, or if its process cannot be read."""

    def told_of(self, pool: PeerPool, named: Grant | TicketRank) -> bool:
        """Whether `named` means this very pool that the peer has told us about: of its run, registered that time."""
        return (named.incarnation, named.epoch) == (self.incarnation, pool.epoch)
