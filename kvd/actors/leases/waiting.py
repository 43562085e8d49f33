"""Claims that came before their offer."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvd import limits
from kvd.actors.leases.offers import ClaimKey, OfferKey
from kvd.actors.runtime.deadlines import Deadlines
from kvd.actors.runtime.loop import Loop
from kvd.errors import ErrorCode, Unavailable
from kvd.protocol.peer import Claim


class Waiting(NamedTuple):
    """A claim, and whose share of the places it takes."""

    peer: str
    claim: Claim


class WaitingClaims:
    """Each waits for `seconds` since it came; `over` is called when they have passed."""

    def __init__(self, loop: Loop, seconds: float, over: Callable[[ClaimKey], None]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._claims: dict[ClaimKey, Waiting] = {}
        self._by_offer: dict[OfferKey, dict[ClaimKey, None]] = {}
        self._of_peer: Counter[str] = Counter()
        self._due: Deadlines[ClaimKey] = Deadlines(loop, over)

    def __len__(self) -> int:
        return len(self._claims)

    def __contains__(self, key: ClaimKey) -> bool:
        return key in self._claims

    def put(self, key: ClaimKey, peer: str, claim: Claim) -> None:
        """One more.

        Raises:
            Unavailable: `OVERLOADED`, as many wait already, of this peer or of all.

        """
        mine, all_of_them = self._of_peer[peer], len(self._claims)
        if mine >= limits.MAX_CLAIMS_WAITING_PER_PEER or all_of_them >= limits.MAX_CLAIMS_WAITING:
            text = f"{mine} claims of this daemon and {all_of_them} in all wait for their offers; try again later"
            raise Unavailable(ErrorCode.OVERLOADED, text)
        self._claims[key] = Waiting(peer, claim)
        self._of_peer[peer] += 1
        self._by_offer.setdefault((claim.pool, claim.offer), {})[key] = None
        self._due.set(key, self._loop.time() + self._seconds)

    def take(self, key: ClaimKey) -> Waiting | None:
        """It waits no longer; None where it did not."""
        waiting = self._claims.pop(key, None)
        if waiting is not None:
            self._due.unset(key)
            self._of_peer[waiting.peer] -= 1
            if not self._of_peer[waiting.peer]:
                del self._of_peer[waiting.peer]
            offer = (waiting.claim.pool, waiting.claim.offer)
            del self._by_offer[offer][key]
            if not self._by_offer[offer]:
                del self._by_offer[offer]
        return waiting

    def take_for(self, offer: OfferKey) -> Iterator[tuple[ClaimKey, Waiting]]:
        """Those of an offer that has come, in the order they came."""
        return self._take_each(self._by_offer.get(offer, {}))

    def take_all(self) -> Iterator[tuple[ClaimKey, Waiting]]:
        """All of them."""
        return self._take_each(self._claims)

    def _take_each(self, keys: dict[ClaimKey, None] | dict[ClaimKey, Waiting]) -> Iterator[tuple[ClaimKey, Waiting]]:
        for key in list(keys):
            waiting = self.take(key)
            if waiting is not None:
                yield key, waiting
