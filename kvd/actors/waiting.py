"""Claims that came before their offer."""

from collections.abc import Callable, Iterator

from kvd.actors.expiry import Expiry
from kvd.actors.loop import Loop
from kvd.actors.offers import ClaimKey, OfferKey
from kvd.protocol.peer import Claim


class WaitingClaims:
    """Each waits for `seconds` since it was last asked; `over` is called when they have passed."""

    def __init__(self, loop: Loop, seconds: float, over: Callable[[ClaimKey], None]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._claims: dict[ClaimKey, Claim] = {}
        self._by_offer: dict[OfferKey, dict[ClaimKey, None]] = {}
        self._due: Expiry[ClaimKey] = Expiry(loop, over)

    def __len__(self) -> int:
        return len(self._claims)

    def __contains__(self, key: ClaimKey) -> bool:
        return key in self._claims

    def put(self, key: ClaimKey, claim: Claim) -> None:
        """One more."""
        self._claims[key] = claim
        self._by_offer.setdefault((claim.pool, claim.offer), {})[key] = None
        self.asked_again(key)

    def asked_again(self, key: ClaimKey) -> None:
        """It waits as long as if it had come now."""
        self._due.set(key, self._loop.time() + self._seconds)

    def take(self, key: ClaimKey) -> Claim | None:
        """It waits no longer; None where it did not."""
        claim = self._claims.pop(key, None)
        if claim is not None:
            self._due.unset(key)
            offer = (claim.pool, claim.offer)
            del self._by_offer[offer][key]
            if not self._by_offer[offer]:
                del self._by_offer[offer]
        return claim

    def take_for(self, offer: OfferKey) -> Iterator[tuple[ClaimKey, Claim]]:
        """Those of an offer that has come, in the order they were asked."""
        for key in self._by_offer.pop(offer, {}):
            self._due.unset(key)
            yield key, self._claims.pop(key)

    def take_all(self) -> Iterator[tuple[ClaimKey, Claim]]:
        """All of them."""
        claims, self._claims = self._claims, {}
        self._by_offer.clear()
        for key, claim in claims.items():
            self._due.unset(key)
            yield key, claim
