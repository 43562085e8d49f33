"""Which ranks of a producing engine one of our pools reads from, and how: worked out once, used by every pull."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvd import limits, plan
from kvd.actors.runtime.pools import PeerPool, PeerView, Pool, check_complete
from kvd.errors import ErrorCode, refusal
from kvd.layout import Full, Group
from kvd.layout.spec import ENUMERATED
from kvd.plan import Descriptors, Planner
from kvd.protocol.peer import Grown
from kvd.protocol.ticket import TicketRank
from kvd.protocol.types import Span, Spans, go_on

RouteKey = tuple[int, tuple[tuple[str, int, str, int], ...]]

_NOTHING = Span(0, 0, b"")
"""Stands for a group that is not named."""
_STEPS = 64
"""What a view or a group takes to look at, counted in descriptors."""


@dataclass(frozen=True, slots=True)
class Source:
    """One producer rank as this pool sees it. Without a planner nothing is read from it, only its lease is fenced."""

    rank: int
    """Its index in the ticket."""
    pool: PeerPool
    agent: str
    readers: int
    """How many ranks of this engine claim its lease."""
    planner: Planner | None


Sources = tuple[Source, ...]


def is_long(pools: Iterable[PeerPool | Pool]) -> bool:
    """Whether a route takes longer to work out than the loop should: each part of a block counts, and each rank.

    `pools` are those of both sides: each that it is from, and with each the one that it leads to.
    """
    specs = [pool.spec for pool in pools]
    ranks = max(spec.shard.ranks for spec in specs)  # those that read a view's heads are counted one by one
    steps = 0
    for spec in specs:
        for group in spec.groups:
            steps += _STEPS
            for view in group.views:
                steps += _STEPS + ranks + len(view.layers) * math.prod(map(view.size, ENUMERATED))
                if steps > limits.MAX_ROUTED_AT_ONCE:
                    return True
    return steps > limits.MAX_ROUTED_AT_ONCE


def route_key(pool: Pool, ranks: Sequence[TicketRank], views: dict[str, PeerView]) -> RouteKey:
    """What a route depends on: this pool and every producer rank's pool, each by epoch.

    Raises:
        Unavailable: `OFFER_GONE`, a producer's daemon has no such pool.

    """
    sources = []
    for rank in ranks:
        view = views[rank.address]
        peer_pool = view.pools.get(rank.pool)
        if peer_pool is None:
            text = f"the daemon {view.daemon!r} at {rank.address} has no pool {rank.pool!r}"
            raise refusal(ErrorCode.OFFER_GONE, text)
        sources.append((rank.address, view.incarnation, rank.pool, peer_pool.epoch))
    return pool.epoch, tuple(sources)


def make_route(pool: Pool, ranks: Sequence[TicketRank], views: dict[str, PeerView]) -> Sources:
    """The producer ranks that this pool reads from, and those that wait for its claim all the same.

    Raises:
        BadRequest: `INCOMPATIBLE`, the layouts do not fit; the text names the field and both values.

    """
    pools = [views[rank.address].pools[rank.pool] for rank in ranks]
    aligned = [plan.align(peer_pool.spec, pool.spec) for peer_pool in pools]
    for theirs, ours in aligned:
        plan.check_compatible(theirs, ours)
    routing = plan.route([theirs for theirs, _ in aligned], pool.spec)
    planners: dict[int, Planner] = {}
    descriptors = units = 0
    for share in routing.shares:
        planners[share.source] = planner = Planner(*aligned[share.source], share)
        descriptors += planner.of_a_block
        units += planner.units
        so_far = f"{len(planners)} of {len(routing.shares)} ranks"
        plan.check_runs(so_far, descriptors, limits.MAX_ROUTE_DESCRIPTORS)
        plan.check_units(so_far, units)
    involved = sorted(planners.keys() | set(routing.releases))
    return tuple(
        Source(
            rank=index,
            pool=pools[index],
            agent=views[ranks[index].address].agent,
            readers=max(1, routing.readers[index]),
            planner=planners.get(index),
        )
        for index in involved
    )


class Named:
    """The blocks that an offer has had so far, by group: what is told by little parts is not copied each time."""

    def __init__(self) -> None:
        self._first: dict[int, int] = {}
        self._ids: dict[int, bytearray] = {}
        self.stops: dict[int, int] = {}
        """The position behind the last block, by group."""
        self.blocks = 0

    def add(self, spans: Spans) -> None:
        """Takes more, which must go on where those before it end.

        Raises:
            BadRequest: `BAD_BLOCKS`, it does not, or ids are no whole numbers of 4 bytes.

        """
        for span in spans:
            if len(span.ids) % 4:
                text = f"{len(span.ids)} bytes of block ids are told of group {span.group}, which is no multiple of 4"
                raise refusal(ErrorCode.BAD_BLOCKS, text)
            go_on(self.stops, span)
            self._first.setdefault(span.group, span.first)
            self._ids.setdefault(span.group, bytearray()).extend(span.ids)
            self.blocks += len(span.ids) // 4

    def all(self) -> Spans:
        """All of them, as `kvd.protocol.types.joined` has them."""
        return tuple(Span(group, self._first[group], bytes(ids)) for group, ids in self._ids.items())

    def between(self, start: int, stop: int, groups: Sequence[Group]) -> Spans:
        """Those that hold tokens from `start` to `stop`, of groups that attend to every token."""
        found = []
        for number, group in enumerate(groups):
            if number in self._ids and isinstance(group.window, Full):
                first = self._first[number]
                low = max(first, start // group.block_tokens)
                high = max(low, -(-stop // group.block_tokens))
                found.append(Span(number, low, bytes(self._ids[number][4 * (low - first) : 4 * (high - first)])))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Told:
    """What is known of the blocks that one producer rank offers: all of them, or what the offer has had so far."""

    tokens: int
    spans: Spans
    """Those that may be read: not what is read already, until it is `whole`."""
    whole: bool
    """No more will come."""
    parts: int = 0
    """How many the producer has told of."""
    stamp: int = 0
    """The word of the lease's stamp; 0 if there is none."""
    read: int = 0
    """So many tokens are read already."""
    named: Named | None = field(default=None, compare=False)
    """All that an offer has had that has grown; what it was before its latest part has the same."""

    @property
    def section(self) -> plan.Section:
        """What of it is to be read now."""
        return plan.Section(self.read, None if self.whole else self.tokens)

    def landed(self) -> "Told":
        """Once that is read."""
        return replace(self, read=self.tokens)

    def more(self, grown: Grown, groups: Sequence[Group]) -> "Told":
        """With what the producer tells now of a pool with these `groups`.

        Raises:
            BadRequest: `BAD_BLOCKS`, it does not go on where it ended, says nothing new, or that more is complete than
                the blocks hold, so that something would count as read that was not; `TOO_LARGE`, it is too much.

        """
        if grown.parts <= self.parts:
            text = f"an offer of {self.parts} parts has grown, and is said to have {grown.parts}"
            raise refusal(ErrorCode.BAD_BLOCKS, text)
        if grown.parts > limits.MAX_PARTS_TOLD:
            text = f"an offer has grown to {grown.parts} parts; the bound is {limits.MAX_PARTS_TOLD}"
            raise refusal(ErrorCode.TOO_LARGE, text)
        named = self.named or Named()
        named.add(grown.spans)
        if named.blocks > limits.MAX_BLOCKS_PER_REQUEST:
            text = f"an offer has grown to {named.blocks} blocks; the bound is {limits.MAX_BLOCKS_PER_REQUEST}"
            raise refusal(ErrorCode.TOO_LARGE, text)
        if grown.tokens < self.tokens:
            raise refusal(ErrorCode.BAD_BLOCKS, f"an offer has gone back from {self.tokens} tokens to {grown.tokens}")
        if grown.closed:
            spans = named.all()
        else:
            check_complete(named.stops, grown.tokens, groups)
            spans = named.between(self.read, grown.tokens, groups)
        return Told(grown.tokens, spans, grown.closed, grown.parts, grown.stamp, self.read, named)


def is_large(source: Source, told: Told, wanted: Sequence[Span], groups: Sequence[Group]) -> bool:
    """Whether the plan of a read takes longer than the loop should: it is made on a thread."""
    if source.planner is not None and source.planner.strides > limits.MAX_STRIDES_AT_ONCE:
        return True
    return _most(source, told, wanted, groups) > limits.MAX_PLANNED_AT_ONCE


def parts(source: Source, told: Told, wanted: Sequence[Span], groups: Sequence[Group]) -> tuple[plan.Section, ...]:
    """What is new of the `wanted` blocks, cut so that a part has about `limits.PLANNED_PART` descriptors at most.

    They are more if there would be more than `limits.MAX_PARTS` parts. Windows and states come with the last part.
    """
    whole = told.section
    count = min(limits.MAX_PARTS, -(-_most(source, told, wanted, groups) // limits.PLANNED_PART))
    stops: range | tuple[int, ...] = ()
    full = [span for span in wanted if span.ids and isinstance(groups[span.group].window, Full)]
    ends = [_tokens(span, groups[span.group]) for span in full]
    if count > 1 and ends:
        first = max(whole.start, min(start for start, _ in ends))
        last = max(stop for _, stop in ends) if whole.stop is None else whole.stop
        step = max(1, -(-(last - first) // count))
        stops = range(first + step, last, step)
    starts = (whole.start, *stops)
    return tuple(plan.Section(*each) for each in zip(starts, (*stops, whole.stop), strict=True))


def _tokens(span: Span, group: Group) -> tuple[int, int]:
    """The first and last + 1 token of a span's blocks."""
    return span.first * group.block_tokens, (span.first + len(span.ids) // 4) * group.block_tokens


def _most(source: Source, told: Told, wanted: Sequence[Span], groups: Sequence[Group]) -> int:
    """How many descriptors the plan of a read has at most, and the blocks that it is about at least."""
    if source.planner is None:
        return 0
    blocks = sum(_new(told, span, groups[span.group]) for span in wanted)
    return max(source.planner.most(blocks), blocks)


def _new(told: Told, span: Span, group: Group) -> int:
    """How many of the blocks of `span` a plan is about, at most."""
    count = len(span.ids) // 4
    if not isinstance(group.window, Full):
        return count if told.whole else 0
    stop = span.first + count
    if not told.whole:
        stop = min(stop, told.tokens // group.block_tokens + 1)
    return max(0, stop - max(span.first, told.read // group.block_tokens))


def plan_read(source: Source, told: Told, section: plan.Section, wanted: Sequence[Span]) -> Descriptors:
    """The descriptors that bring a `section` of the `wanted` blocks from one producer rank; there may be none.

    Raises:
        BadRequest: `BAD_BLOCKS`, a position is wanted that was not offered, or the producer's pool has no such block;
            `BAD_TICKET`, the block ids are not whole numbers of 4 bytes.

    """
    if source.planner is None or not any(len(span.ids) for span in wanted):
        return Descriptors.of(())
    for span in told.spans:
        if len(span.ids) % 4:
            text = (
                f"the ticket gives {len(span.ids)} bytes of block ids for group {span.group}, which is no multiple of 4"
            )
            raise refusal(ErrorCode.BAD_TICKET, text)
        if span.group < len(source.pool.spec.groups):
            plan.check_ids(source.pool.spec.groups[span.group], span.ids)
    there, here = {span.group: span for span in told.spans}, {span.group: span for span in wanted}
    spans = [_pair(there.get(group, _NOTHING), here.get(group, _NOTHING)) for group in range(source.planner.groups)]
    return source.planner.plan(spans, told.tokens, section)


def _pair(there: Span, here: Span) -> plan.SpanPair:
    return plan.SpanPair(there.first, memoryview(there.ids).cast("I"), here.first, memoryview(here.ids).cast("I"))
