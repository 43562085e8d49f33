"""Blocks of offers that have ended go back to their workers: many of them in parts, between which others have turns."""

from collections.abc import Callable

from kvd import limits
from kvd.actors.leases.content import Part
from kvd.actors.leases.lease import Lease
from kvd.actors.runtime.actor import Actor
from kvd.actors.runtime.deferred import Batch


class Returns:
    """Calls `returned(lease)` once all blocks of an offer are back, at once if they are few."""

    def __init__(self, actor: Actor, returned: Callable[[Lease], None]) -> None:
        self._returned = returned
        self._parts: Batch[tuple[Lease, Part | None]] = Batch(actor, self._give_back, _weight)

    def put(self, lease: Lease) -> None:
        """Gives the blocks of a lease back, which has ended."""
        parts = [*((lease, part) for part in lease.content.parts), (lease, None)]
        if lease.size.blocks + lease.content.spans <= limits.BATCH_BLOCKS:
            self._give_back(parts)
            return
        for each in parts:
            self._parts.put(each)

    def _give_back(self, parts: list[tuple[Lease, Part | None]]) -> None:
        for lease, part in parts:
            if part is None:
                self._returned(lease)
            else:
                lease.pool.blocks.release(part.spans)


def _weight(item: tuple[Lease, Part | None]) -> int:
    """Blocks and spans: an offer may have very many parts with few blocks, or none."""
    lease, part = item
    return 0 if part is None else lease.pool.blocks.size_of(part.spans).blocks + max(1, len(part.spans))
