"""Consumers that have finished with offers: so many are remembered, until the offers end, and no more."""

from collections import Counter

from kvd import limits
from kvd.actors.leases.lease import Lease
from kvd.errors import ErrorCode, refusal
from kvd.protocol.peer import Claim


class Consumers:
    """Those of one daemon's leases, which have them; here they are counted by worker."""

    def __init__(self) -> None:
        self._of_pool: Counter[int] = Counter()

    def check(self, lease: Lease, consumer: str) -> None:
        """Checks whether a consumer may have a part in an offer.

        Raises:
            Unavailable: `OVERLOADED`, too many have one in this offer, or in all of its worker's.

        """
        if consumer in lease.finished:
            return
        of_worker = self._of_pool[lease.pool.id]
        if len(lease.finished) >= 2 * limits.MAX_CONSUMERS or of_worker >= limits.MAX_CONSUMERS_PER_WORKER:
            text = f"{len(lease.finished)} consumers have a part in the offer {lease.key[1]!r} already"
            raise refusal(ErrorCode.OVERLOADED, f"{text}, {of_worker} in all offers of its worker")

    def finish(self, lease: Lease, claim: Claim) -> None:
        """One reader of a consumer has all it wanted."""
        if lease.finish(claim):
            self._of_pool[lease.pool.id] += 1

    def forget(self, lease: Lease) -> None:
        """The offer has ended: nobody counts its consumers any more."""
        self._of_pool -= Counter({lease.pool.id: len(lease.finished)})
        lease.finished.clear()
        lease.done.clear()
