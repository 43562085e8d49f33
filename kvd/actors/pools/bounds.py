"""How many pools there may be, and how many bytes each user's may have; kept ones make room for an attach.

A pool that waits for a successor, and of which nothing is leased, ends for another attach of its user, if only such
pools are in that one's way.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import structlog

from kvd import limits
from kvd.actors.pools.pool import PoolRecord, State
from kvd.actors.pools.requests import AttachPool
from kvd.errors import ErrorCode, KvdError, NoMemory, refusal
from kvd.memory.interface import MemoryProvider, PoolStore
from kvd.net.unix import is_trusted

_log = structlog.get_logger("kvd.pools")


class Lack(NamedTuple):
    """Why an attach cannot be served: as much of its user's other pools is in the way, `of` each so much."""

    error: KvdError
    much: int
    of: Callable[[PoolRecord], int]


class Bounds:
    """`records` are the pools by name. `end(record, request)` ends a pool and then serves an attach again.

    `leased` gives the ids of the pools of which offers stand.
    """

    def __init__(
        self,
        provider: MemoryProvider,
        store: PoolStore,
        records: Mapping[str, PoolRecord],
        *,
        leased: Callable[[], Collection[int]],
        end: Callable[[PoolRecord, AttachPool], None],
        refuse: Callable[[AttachPool, KvdError], None],
    ) -> None:
        self._provider = provider
        self._store = store
        self._records = records
        self._leased = leased
        self._end = end
        self._refuse = refuse

    def lacks(self, request: AttachPool) -> list[Lack]:
        """What stands against a pool of that size beside the others of this user: all of it, as each may be in vain."""
        return [lack for lack in (self._count(request), *self._layouts(request), self._quota(request)) if lack]

    def _count(self, request: AttachPool) -> Lack | None:
        others = self._others(request)
        if len(others) >= limits.MAX_POOLS_PER_USER:
            text = f"user {request.uid} has {len(others)} other pools, the bound; detach one, or wait for `pool_linger`"
        elif request.worker not in self._records and len(self._records) >= limits.MAX_POOLS:
            text = f"there are {limits.MAX_POOLS} pools already, the bound"
        elif not is_trusted(request.uid) and len(self._strangers(request)) >= limits.MAX_POOLS_OF_STRANGERS:
            text = f"users but root and the daemon's own have {limits.MAX_POOLS_OF_STRANGERS} other pools, the bound"
        else:
            return None
        return Lack(refusal(ErrorCode.OVERLOADED, text), 1, _one)

    def _layouts(self, request: AttachPool) -> Iterator[Lack | None]:
        whose, every = self._others(request), self._records.values()
        if is_trusted(request.uid):
            yield self._layout(whose, request, limits.MAX_LAYOUT_BYTES_PER_USER, f"user {request.uid}")
        else:
            yield self._layout(whose, request, limits.MAX_LAYOUT_BYTES_PER_STRANGER, f"user {request.uid}")
            yield self._layout(self._strangers(request), request, limits.MAX_LAYOUT_BYTES_OF_STRANGERS, "all strangers")
        yield self._layout(every, request, limits.MAX_LAYOUT_BYTES, "all users")

    def _layout(self, records: Iterable[PoolRecord], request: AttachPool, bound: int, whose: str) -> Lack | None:
        """What stands against a layout beside those of others: peers could not be told of all in one message."""
        own = self._records.get(request.worker)
        size = _told(own) if own is not None and own.suits(request) else len(request.raw_spec)  # it is told of as it is
        others = sum(map(_told, (each for each in records if each is not own)))
        if others + size <= bound:
            return None
        text = (
            f"a layout of {size} bytes, and {others} of other pools of {whose}, are above the bound of {bound}; "
            "say it with fewer bytes, or detach another pool"
        )
        return Lack(refusal(ErrorCode.OVERLOADED, text), others + size - bound, _told)

    def _quota(self, request: AttachPool) -> Lack | None:
        size = self._provider.footprint(request.spec.pool_bytes)
        held = sum(map(self.footprint, self._others(request)))
        if request.quota is None or held + size <= request.quota:
            return None
        text = (
            f"{size} bytes for {request.worker!r} and {held} in other pools of user {request.uid} are above its "
            f"quota of {request.quota}; detach another pool, or raise `max_bytes` in the daemon's `worker_policy`"
        )
        return Lack(refusal(ErrorCode.NOT_PERMITTED, text), held + size - request.quota, self.footprint)

    def make_room(self, request: AttachPool, lacks: Sequence[Lack]) -> None:
        """Ends a kept pool for an attach, which is then tried again; refuses the attach if ending all would not do.

        It ends the pool that was kept longest of those that are enough, or the first of several that are.
        """
        unlent, leased = self._unlent(request), self._leased()
        if lack := _unmet(lacks, unlent):
            if isinstance(lack.error, NoMemory):
                self._store.give_up(request.uid)  # what no worker has claimed since the daemon started
            self._refuse(request, lack.error)
            return
        spare = [record for record in unlent if record.is_spare and record.pool.id not in leased]
        if lack := _unmet(lacks, spare):
            self._refuse_for_now(request, lack)
            return
        enough = [record for record in spare if not _unmet(lacks, [record])]
        record = min(enough or spare, key=lambda each: each.kept_since)
        _log.info("a pool whose worker is gone makes room", pool=record.pool.name, worker=request.worker)
        self._end(record, request)

    def _refuse_for_now(self, request: AttachPool, lack: Lack) -> None:
        """What is in the way now need not be for long."""
        names = ", ".join(sorted(repr(record.pool.name) for record in self._unlent(request)))
        text = f"{lack.error.text}. Workers of {names} are gone, but their processes live, offers stand, or they are "
        text += "ending just now: end those processes, try again, or free a pool by `kvd pools end NAME`"
        error = refusal(ErrorCode.OVERLOADED, text)
        self._refuse(request, error)

    def _others(self, request: AttachPool) -> list[PoolRecord]:
        of_user = [record for record in self._records.values() if record.request.uid == request.uid]
        return [record for record in of_user if record.pool.name != request.worker]

    def _strangers(self, request: AttachPool) -> list[PoolRecord]:
        """Other pools of all users but root and our own."""
        every = self._records.values()
        return [each for each in every if each.pool.name != request.worker and not is_trusted(each.request.uid)]

    def _unlent(self, request: AttachPool) -> list[PoolRecord]:
        """Other pools of this user that no worker has or is about to get."""
        states = (State.KEPT, State.QUIESCING, State.ENDING)
        return [record for record in self._others(request) if record.shown in states]

    def footprint(self, record: PoolRecord) -> int:
        """Bytes of memory that a pool takes."""
        return self._provider.footprint(record.pool.size)


def _unmet(lacks: Iterable[Lack], records: Sequence[PoolRecord]) -> Lack | None:
    """What would still stand against an attach without these pools."""
    return next((lack for lack in lacks if sum(map(lack.of, records)) < lack.much), None)


def _told(record: PoolRecord) -> int:
    """Bytes that peers are told of a pool's layout."""
    return len(record.pool.raw_spec)


def _one(_record: PoolRecord) -> int:
    return 1
