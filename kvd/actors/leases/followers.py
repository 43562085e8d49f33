"""Readers of offers that grow: each is told what is new once for each time it asks.

So nobody is told faster than it reads, and what came meanwhile is told together, up to a bound on one answer: whoever
asks by a few bytes gets no megabytes, and those answers that it leaves unread take little memory.
"""

from collections.abc import Callable

from kvd.actors.leases.claim import ClaimRecord
from kvd.actors.leases.lease import Lease
from kvd.protocol.peer import Grown


class Followers:
    """Answers by `reply(sender, answer)`."""

    def __init__(self, reply: Callable[[bytes, Grown], None]) -> None:
        self._reply = reply

    def ask(self, claim: ClaimRecord, seen: int) -> None:
        """The reader of a claim that is held knows `seen` parts, and asks for more."""
        claim.follows = seen
        self._tell(claim)

    def grown(self, lease: Lease) -> None:
        """An offer was extended or closed."""
        for claim in lease.claims.values():
            self._tell(claim)

    def _tell(self, claim: ClaimRecord) -> None:
        lease, seen = claim.lease, claim.follows
        if lease is None or seen is None or seen >= len(lease.content.parts):
            return
        told = lease.content.after(seen)
        claim.follows, claim.told = None, max(claim.told, told.parts)
        grown = Grown(
            claim=claim.key.claim,
            seen=seen,
            parts=told.parts,
            tokens=told.tokens,
            spans=told.spans,
            closed=told.is_last,
            stamp=lease.stamp,
        )
        self._reply(claim.key.sender, grown)
