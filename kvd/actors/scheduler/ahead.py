"""Claims whose tickets name no lease: they wait at the producer for offers that may not have been made yet."""

from collections import Counter

from kvd import limits
from kvd.actors.scheduler.transfer import State, Transfer
from kvd.errors import ErrorCode, refusal


class ClaimsAhead:
    """Counts them by user and producer, who has room for so many of this daemon: one user leaves some to others."""

    def __init__(self) -> None:
        self._waiting: Counter[tuple[int, str]] = Counter()

    def check(self, transfer: Transfer) -> None:
        """Checks whether one more may wait.

        Raises:
            Unavailable: `OVERLOADED`, too many of its user's claims do already.

        """
        waiting = self._waiting[_key(transfer)]
        if waiting >= limits.MAX_CLAIMS_AHEAD:
            text = f"{waiting} claims of this user wait for offers at {transfer.address}, the bound; try again later"
            raise refusal(ErrorCode.OVERLOADED, text)

    def step(self, transfer: Transfer, before: State) -> None:
        """A transfer has come from another state."""
        key = _key(transfer)
        self._waiting[key] += (transfer.state is State.CLAIMING) - (before is State.CLAIMING)
        if not self._waiting[key]:
            del self._waiting[key]


def _key(transfer: Transfer) -> tuple[int, str]:
    return transfer.pull.pool.uid, transfer.address
