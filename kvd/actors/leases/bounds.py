"""How much the offers of one worker may take: offers that stand, their parts, and consumers that are remembered."""

from collections import Counter

from kvd import limits
from kvd.actors.leases.lease import Lease
from kvd.errors import ErrorCode, refusal
from kvd.protocol.peer import Claim


class Bounds:
    """Counts by the id of the worker's pool, until the blocks of an offer are the worker's again."""

    def __init__(self) -> None:
        self.standing: Counter[int] = Counter()
        self.parts: Counter[int] = Counter()
        self._consumers: Counter[int] = Counter()
        """Those that have finished with an offer: it is the lease that has them."""

    def check_offer(self, pool: int) -> None:
        """Checks whether one more may stand.

        Raises:
            Unavailable: `OVERLOADED`.

        """
        if self.standing[pool] >= limits.MAX_REQUESTS_PER_WORKER:
            text = f"{self.standing[pool]} offers of this worker stand, the bound; wait until some are released"
            raise refusal(ErrorCode.OVERLOADED, text)

    def check_parts(self, lease: Lease) -> None:
        """Checks whether one more may be named for this offer.

        Raises:
            BadRequest: `TOO_LARGE`, this offer has too many, or too many lists of block ids.
            Unavailable: `OVERLOADED`, all of its worker's do.

        """
        if len(lease.content.parts) >= limits.MAX_PARTS_PER_OFFER:
            text = f"the offer was extended {len(lease.content.parts)} times, the bound; close it with all that is left"
            raise refusal(ErrorCode.TOO_LARGE, text)
        if lease.content.spans >= limits.MAX_SPANS_PER_OFFER:
            text = f"the offer has {lease.content.spans} lists of block ids, the bound; close it with all that is left"
            raise refusal(ErrorCode.TOO_LARGE, text)
        if self.parts[lease.pool.id] >= limits.MAX_PARTS_PER_WORKER:
            text = f"{self.parts[lease.pool.id]} parts of this worker's offers stand, the bound"
            raise refusal(ErrorCode.OVERLOADED, f"{text}; name more at a time, or wait until some are released")

    def check_consumer(self, lease: Lease, consumer: str) -> None:
        """Checks whether a consumer may have a part in an offer.

        Raises:
            Unavailable: `OVERLOADED`, too many have one in this offer, or in all of its worker's.

        """
        if consumer in lease.finished:
            return
        of_worker = self._consumers[lease.pool.id]
        if len(lease.finished) >= 2 * limits.MAX_CONSUMERS or of_worker >= limits.MAX_CONSUMERS_PER_WORKER:
            text = f"{len(lease.finished)} consumers have a part in the offer {lease.key[1]!r} already"
            raise refusal(ErrorCode.OVERLOADED, f"{text}, {of_worker} in all offers of its worker")

    def finish(self, lease: Lease, claim: Claim) -> None:
        """One reader of a consumer has all it wanted."""
        if lease.finish(claim):
            self._consumers[lease.pool.id] += 1

    def begin(self, lease: Lease) -> None:
        """It stands from now on."""
        self.standing[lease.pool.id] += 1

    def end(self, lease: Lease) -> None:
        """Its blocks are its worker's again: nobody counts its parts and its consumers any more."""
        pool = lease.pool.id
        self.standing -= Counter({pool: 1})
        self.parts -= Counter({pool: lease.content.spans})
        self._consumers -= Counter({pool: len(lease.finished)})
        lease.finished.clear()
        lease.done.clear()
