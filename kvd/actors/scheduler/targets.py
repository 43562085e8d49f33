"""The pools that pulls write to: which of their blocks are busy or in quarantine, and how much is open."""

from kvd import limits
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.pools import HeldBlocks, Hold, Pool
from kvd.actors.scheduler.pull import Pull
from kvd.errors import ErrorCode, refusal

_HOLDS = (Hold.PULLING, Hold.QUARANTINED)


class Targets:
    """The pools of this daemon's workers, from their registration until they are gone."""

    def __init__(self, context: ActorContext) -> None:
        self._context = context
        self._pools: dict[str, Pool] = {}
        self._open: dict[int, tuple[int, int, int]] = {}
        """How many pulls have not given their blocks back, and how many ranks and bytes their tickets have; by pool."""
        self._closing: set[int] = set()
        self.quarantined = 0
        """Pulls whose blocks are in quarantine."""
        self.held = HeldBlocks(_HOLDS)
        context.metrics.watch_held(_HOLDS, self.held.of)

    def up(self, pool: Pool) -> None:
        """Accepts pulls into this pool from now on."""
        self._pools[pool.name] = pool

    def close(self, pool: int) -> None:
        """Accepts no more pulls into this pool."""
        self._closing.add(pool)

    def down(self, pool: Pool) -> None:
        """Forgets a pool that is gone; it was quiet."""
        del self._pools[pool.name]
        self._closing.discard(pool.id)

    def is_quiet(self, pool: int) -> bool:
        """Whether it is closing, and nothing writes to it any more."""
        return pool in self._closing and pool not in self._open

    def take(self, pull: Pull) -> None:
        """Accepts a pull and marks its blocks as busy, until they are given back.

        Raises:
            BadRequest: `BAD_BLOCKS`, a block is named twice.
            Unavailable: `POOL_BUSY`, the pool is closing; `OVERLOADED`, too much is open; `BLOCKS_BUSY`,
                a block belongs to another pull, or is offered.

        """
        pool = pull.pool
        if self._pools.get(pool.name) is not pool or pool.id in self._closing:
            raise refusal(ErrorCode.POOL_BUSY, f"the pool {pool.name!r} is being given back")
        opened = self._with(pool.id, 1, len(pull.ticket.ranks), pull.ticket_bytes)
        _check_bounds(*opened)
        pool.blocks.take(pull.blocks)
        self._open[pool.id] = opened
        self.held.move(pull.size, None, Hold.PULLING)

    def grow(self, pull: Pull, more: int) -> None:
        """Counts so many bytes, of which a producer has told, as a part of a pull's ticket.

        Raises:
            Unavailable: `OVERLOADED`, too much is open.

        """
        opened = self._with(pull.pool.id, 0, 0, more)
        _check_bounds(*opened)
        self._open[pull.pool.id] = opened
        pull.ticket_bytes += more

    def _with(self, pool: int, pulls: int, ranks: int, ticket_bytes: int) -> tuple[int, int, int]:
        """What is open, and so much more."""
        open_pulls, open_ranks, open_bytes = self._open.get(pool, (0, 0, 0))
        return open_pulls + pulls, open_ranks + ranks, open_bytes + ticket_bytes

    def quarantine(self, pull: Pull) -> None:
        """Counts a pull that has ended while the transport may still write to its blocks."""
        self.held.move(pull.size, Hold.PULLING, Hold.QUARANTINED)
        self._count_quarantined(+1)

    def end_quarantine(self, pull: Pull) -> None:
        """The transport has ended the reads of such a pull; `give_back` follows."""
        self.held.move(pull.size, Hold.QUARANTINED, Hold.PULLING)
        self._count_quarantined(-1)

    def _count_quarantined(self, change: int) -> None:
        self.quarantined += change
        self._context.metrics.quarantined.set(self.quarantined)
        bound = self._context.settings.max_quarantined
        over = f"{self.quarantined} pulls are in quarantine, the bound is {bound}: the transport does not end its reads"
        self._context.condition("quarantine", over if self.quarantined > bound else None)

    def give_back(self, pull: Pull) -> None:
        """Frees the blocks of a pull, to which nothing writes any more."""
        self.held.move(pull.size, Hold.PULLING, None)
        pull.pool.blocks.give_back(pull.blocks)
        left = self._with(pull.pool.id, -1, -len(pull.ticket.ranks), -pull.ticket_bytes)
        if left[0]:
            self._open[pull.pool.id] = left
        else:
            del self._open[pull.pool.id]

    def busy_blocks(self) -> dict[str, int]:
        """How many blocks are busy, by worker."""
        return {pool.name: pool.blocks.busy for pool in self._pools.values()}


def _check_bounds(pulls: int, ranks: int, ticket_bytes: int) -> None:
    """Refuses what would have more open for one worker than is allowed."""
    for what, count, bound in (
        ("pulls of this worker", pulls, limits.MAX_REQUESTS_PER_WORKER),
        ("producer ranks of this worker's pulls", ranks, limits.MAX_RANKS_PER_WORKER),
        ("bytes of tickets of this worker's pulls", ticket_bytes, limits.MAX_TICKET_BYTES_PER_WORKER),
    ):
        if count > bound:
            text = f"with this one {count} {what} would be open, the bound is {bound}; wait until some have ended"
            raise refusal(ErrorCode.OVERLOADED, text)
