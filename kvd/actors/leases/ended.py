"""What has ended: blocks of offers go back to their workers, and it is remembered for a while, for late requests."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from kvd import limits
from kvd.actors.leases.lease import Lease
from kvd.actors.runtime.actor import Actor
from kvd.actors.runtime.deferred import Batch


class Returns:
    """Calls `returned(lease)` once all blocks of an offer are back, at once if they are few.

    Many go back in parts, between which others have turns.
    """

    def __init__(self, actor: Actor, returned: Callable[[Lease], None]) -> None:
        self._returned = returned
        self._parts: Batch[tuple[Lease, int]] = Batch(actor, self._give_back, _weight)
        """Parts of leases by their index; the one behind the last stands for the end."""

    def put(self, lease: Lease) -> None:
        """Gives the blocks of a lease back, which has ended."""
        parts = [(lease, index) for index in range(len(lease.content.parts) + 1)]
        if lease.size.blocks + limits.BLOCKS_PER_RETURN * lease.content.spans <= limits.BATCH_BLOCKS:
            self._give_back(parts)
            return
        for each in parts:
            self._parts.put(each)

    def _give_back(self, parts: list[tuple[Lease, int]]) -> None:
        for lease, index in parts:
            if index == len(lease.content.parts):
                self._returned(lease)
            else:
                lease.pool.blocks.release(lease.content.parts[index].spans)


def _weight(item: tuple[Lease, int]) -> int:
    """Blocks and spans: an offer may have very many parts with few blocks, or none."""
    lease, index = item
    if index == len(lease.content.parts):
        return 0
    spans = lease.content.parts[index].spans
    return lease.pool.blocks.size_of(spans).blocks + limits.BLOCKS_PER_RETURN * max(1, len(spans))


K = TypeVar("K")


class Tombstones(Generic[K]):
    """Calls `forget(key)` for each key, `seconds` after it was buried: until then a late request gets the reason.

    The oldest go early if there are more than `most`, or more than half as many of one owner: others' stay then.
    """

    def __init__(self, actor: Actor, seconds: float, most: int, forget: Callable[[K], None]) -> None:
        self._actor = actor
        self._seconds = seconds
        self._most = most
        self._forget = forget
        self._graves: OrderedDict[K, tuple[float, str]] = OrderedDict()
        """When each is forgotten, and its owner; the oldest first."""
        self._of: dict[str, OrderedDict[K, None]] = {}

    def __len__(self) -> int:
        return len(self._graves)

    def bury(self, key: K, owner: str) -> None:
        """Remembers `key` from now on, which counts as `owner`'s."""
        swept_later = bool(self._graves)
        if key in self._graves:
            self._remove(key)
        self._graves[key] = (self._actor.loop.time() + self._seconds, owner)
        own = self._of.setdefault(owner, OrderedDict())
        own[key] = None
        if not swept_later:
            self._actor.later(self._seconds, self.sweep)
        elif len(own) > max(1, self._most // 2):
            self._end(next(iter(own)))
        elif len(self._graves) > self._most:
            self._end(next(iter(self._graves)))

    def sweep(self) -> None:
        """Forgets those whose time is over."""
        now = self._actor.loop.time()
        while self._graves and (oldest := next(iter(self._graves.items())))[1][0] <= now:
            self._end(oldest[0])
        if self._graves:
            self._actor.later(next(iter(self._graves.values()))[0] - now, self.sweep)

    def _end(self, key: K) -> None:
        self._remove(key)
        self._forget(key)

    def _remove(self, key: K) -> None:
        _, owner = self._graves.pop(key)
        del self._of[owner][key]
        if not self._of[owner]:
            del self._of[owner]
