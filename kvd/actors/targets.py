"""The pools that pulls write to: which of their blocks are busy, and how many pulls are open."""

from kvd import limits
from kvd.actors.blocks import BusyBlocks
from kvd.actors.messages import Pool
from kvd.errors import ErrorCode, Unavailable
from kvd.protocol.types import Spans


class Targets:
    """The pools of this daemon's workers, from when they can be used until they are gone."""

    def __init__(self) -> None:
        self._pools: dict[str, Pool] = {}
        self._busy: dict[int, BusyBlocks] = {}
        self._open: dict[int, int] = {}
        """Pulls, by the id of the pool they write to."""
        self._closing: set[int] = set()

    def up(self, pool: Pool) -> None:
        """Pulls into this pool are welcome."""
        self._pools[pool.worker] = pool
        self._busy[pool.id] = BusyBlocks(pool.spec)

    def close(self, pool: int) -> None:
        """Nothing new is taken of this pool."""
        self._closing.add(pool)

    def down(self, pool: Pool) -> None:
        """The pool is gone; it was quiet."""
        del self._pools[pool.worker], self._busy[pool.id]
        self._closing.discard(pool.id)

    def is_quiet(self, pool: int) -> bool:
        """Whether it is closing, and nothing writes to it any more."""
        return pool in self._closing and pool not in self._open

    def take(self, pool: Pool, spans: Spans) -> None:
        """The blocks of one more pull, which are busy until they are given back.

        Raises:
            BadRequest: `BAD_BLOCKS`, one is named twice.
            Unavailable: `WRONG_STATE`, the pool is closing; `OVERLOADED`, too many pulls are open; `BLOCKS_BUSY`.

        """
        if self._pools.get(pool.worker) is not pool or pool.id in self._closing:
            raise Unavailable(ErrorCode.WRONG_STATE, f"the pool {pool.worker!r} is being given back")
        count = self._open.get(pool.id, 0)
        if count >= limits.MAX_REQUESTS_PER_WORKER:
            text = f"{count} pulls of this worker are open, the bound; wait until some have ended"
            raise Unavailable(ErrorCode.OVERLOADED, text)
        self._busy[pool.id].take(spans)
        self._open[pool.id] = count + 1

    def give_back(self, pool: Pool, spans: Spans) -> None:
        """Nothing writes to these blocks any more."""
        self._busy[pool.id].give_back(spans)
        self._open[pool.id] -= 1
        if not self._open[pool.id]:
            del self._open[pool.id]

    def busy_blocks(self) -> dict[str, int]:
        """How many, by worker."""
        return {pool.worker: self._busy[pool.id].count for pool in self._pools.values()}
