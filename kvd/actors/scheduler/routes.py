"""Which ranks of a producing engine one of our pools reads from, and how: worked out once, used by every pull."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvd import limits, plan
from kvd.actors.runtime.records import PeerPool, PeerView, Pool
from kvd.errors import ErrorCode, refusal
from kvd.plan import Descriptors, Planner
from kvd.protocol.ticket import Ticket, TicketRank
from kvd.protocol.types import Span

RouteKey = tuple[int, tuple[tuple[str, int, str, int], ...]]

_NOTHING = Span(0, 0, b"")
"""Stands for a group that is not named."""


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


def make_route(pool: Pool, ranks: Sequence[TicketRank], views: dict[str, PeerView]) -> tuple[Source, ...]:
    """The producer ranks that this pool reads from, and those that wait for its claim all the same.

    Raises:
        BadRequest: `INCOMPATIBLE`, the two layouts do not fit; the text names the field and both values.

    """
    pools = [views[rank.address].pools[rank.pool] for rank in ranks]
    for peer_pool in pools:
        plan.check_compatible(peer_pool.spec, pool.spec)
    routing = plan.route([peer_pool.spec for peer_pool in pools], pool.spec)
    planners = {share.source: Planner(pools[share.source].spec, pool.spec, share) for share in routing.shares}
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


def is_large(source: Source, wanted: Sequence[Span]) -> bool:
    """Whether the plan of a read takes longer than the loop should: it is made on a thread."""
    if source.planner is None:
        return False
    blocks = sum(len(span.ids) for span in wanted) // 4
    return max(source.planner.most(blocks), blocks) > limits.MAX_PLANNED_AT_ONCE


def plan_read(source: Source, ticket: Ticket, wanted: Sequence[Span], groups: int) -> Descriptors:
    """The descriptors that bring the `wanted` blocks from one producer rank; there may be none.

    Raises:
        BadRequest: `BAD_BLOCKS`, a position is wanted that was not offered, or the producer's pool has no such block;
            `BAD_TICKET`, the ticket's block ids are not whole numbers of 4 bytes.

    """
    if source.planner is None or not any(len(span.ids) for span in wanted):
        return Descriptors.of(())
    offered = ticket.spans(ticket.ranks[source.rank])
    for span in offered:
        if len(span.ids) % 4:
            text = (
                f"the ticket gives {len(span.ids)} bytes of block ids for group {span.group}, which is no multiple of 4"
            )
            raise refusal(ErrorCode.BAD_TICKET, text)
        if span.group < len(source.pool.spec.groups):
            plan.check_ids(source.pool.spec.groups[span.group], span.ids)
    there, here = {span.group: span for span in offered}, {span.group: span for span in wanted}
    spans = [_pair(there.get(group, _NOTHING), here.get(group, _NOTHING)) for group in range(groups)]
    return source.planner.plan(spans, ticket.tokens)


def _pair(there: Span, here: Span) -> plan.Span:
    return plan.Span(there.first, memoryview(there.ids).cast("I"), here.first, memoryview(here.ids).cast("I"))
