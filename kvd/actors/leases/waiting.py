"""Claims that came before their offer: by offer, and how many of them each peer has."""

from collections import Counter

from kvd import limits
from kvd.actors.leases.records import ClaimKey, ClaimRecord, OfferKey
from kvd.errors import ErrorCode, refusal


class WaitingClaims:
    """Keeps the order in which they came."""

    def __init__(self) -> None:
        self._by_offer: dict[OfferKey, dict[ClaimKey, ClaimRecord]] = {}
        self._of_peer: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._of_peer.total()

    def put(self, claim: ClaimRecord) -> None:
        """Adds a claim.

        Raises:
            Unavailable: `OVERLOADED`, too many wait already, of this peer or of all.

        """
        of_peer, of_all = self._of_peer[claim.peer], len(self)
        if of_peer >= limits.MAX_CLAIMS_WAITING_PER_PEER or of_all >= limits.MAX_CLAIMS_WAITING:
            text = f"{of_peer} claims of this daemon and {of_all} in all wait for their offers; try again later"
            raise refusal(ErrorCode.OVERLOADED, text)
        self._of_peer[claim.peer] += 1
        self._by_offer.setdefault(claim.offer, {})[claim.key] = claim

    def discard(self, claim: ClaimRecord) -> None:
        """Takes a claim out, if it waits."""
        claims = self._by_offer.get(claim.offer, {})
        if claims.pop(claim.key, None) is None:
            return
        if not claims:
            del self._by_offer[claim.offer]
        self._of_peer -= Counter([claim.peer])

    def for_offer(self, offer: OfferKey) -> list[ClaimRecord]:
        """The claims that wait for this offer."""
        return list(self._by_offer.get(offer, {}).values())

    def all(self) -> list[ClaimRecord]:
        """All claims that wait."""
        return [claim for claims in self._by_offer.values() for claim in claims.values()]
