"""A claim: a consumer's hold on a lease. Runs at the producer's daemon.

The rules, which the table below makes precise:

- A claim may come before its offer, and waits for it for a while. If its consumer cancels it meanwhile, it waits on, so
  that its reader counts as finished when the offer comes.
- A fence holds only if the claim is held at that moment. Then this reader has finished, and the claim is over.
- A claim is broken if its offer does not come in time, if it is not renewed, or if its lease ends under it. No fence of
  it holds from then on.
- What became of a claim that was fenced or broken is remembered for a while, so that a request that comes late or twice
  gets the same answer. A refused or released claim is forgotten at once.
"""

import hmac
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd import limits
from kvd.actors.runtime.machine import Step, Table
from kvd.actors.runtime.spans import ClaimSpan
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.protocol.peer import Claim, Fence

if TYPE_CHECKING:
    from kvd.actors.leases.lease import Lease


class State(StrEnum):
    """What the consumer may rely on."""

    WAITING = "waiting"
    """nothing yet: its offer may yet come"""
    LEAVING = "leaving"
    """nothing: its reader will not come, which counts once its offer does"""
    HELD = "held"
    """the lease lives at least as long as the claim is renewed"""
    FENCED = "fenced"
    """the lease was held until the fence"""
    BROKEN = "broken"
    """nothing any more"""
    GONE = "gone"
    """nothing: it was refused or released"""


class Event(StrEnum):
    """What happened."""

    GRANT = "grant"
    REFUSE = "refuse"
    FENCE = "fence"
    """the consumer has read everything, under the right generation"""
    BREAK = "break"
    """its offer did not come, its consumer went silent, or its lease ended"""
    RELEASE = "release"
    """the consumer does not want it any more"""
    CANCEL = "cancel"
    """the same before its offer came, and this reader will not come again"""


class Effect(StrEnum):
    """What to do."""

    REMEMBER = "remember"
    FORGET = "forget"
    TELL = "tell"
    """tell the consumer"""
    LEAVE = "leave"
    """take it out of its lease, which ends or goes on"""


_S, _E, _F = State, Event, Effect
_ENDED = (_S.FENCED, _S.BROKEN, _S.GONE)

TABLE: Table[State, Event, Effect] = Table(
    "claim",
    initial=_S.WAITING,
    final=frozenset(_ENDED),
    steps={
        (_S.WAITING, _E.GRANT): Step(_S.HELD),
        (_S.WAITING, _E.REFUSE): Step(_S.GONE, (_F.FORGET,)),
        (_S.WAITING, _E.BREAK): Step(_S.BROKEN, (_F.REMEMBER,)),
        (_S.WAITING, _E.RELEASE): Step(_S.GONE, (_F.FORGET,)),
        (_S.WAITING, _E.CANCEL): Step(_S.LEAVING),
        # It is held for a moment, and released as one that had been held all along.
        (_S.LEAVING, _E.GRANT): Step(_S.HELD),
        (_S.LEAVING, _E.REFUSE): Step(_S.GONE, (_F.FORGET,)),
        (_S.LEAVING, _E.BREAK): Step(_S.GONE, (_F.FORGET,)),
        (_S.HELD, _E.FENCE): Step(_S.FENCED, (_F.REMEMBER, _F.LEAVE)),
        (_S.HELD, _E.BREAK): Step(_S.BROKEN, (_F.REMEMBER, _F.TELL, _F.LEAVE)),
        (_S.HELD, _E.RELEASE): Step(_S.GONE, (_F.FORGET, _F.LEAVE)),
    },
    ignored=dict.fromkeys((_S.LEAVING, *_ENDED), frozenset({_E.RELEASE})),
)


OfferKey = tuple[str, str]
"""(worker, offer)."""


NOT_HELD: Final = refusal(ErrorCode.LEASE_BROKEN, "this daemon knows no such claim (any more)")


class ClaimKey(NamedTuple):
    """A claim of a peer: its routing id, which is new with each incarnation, and its number."""

    sender: bytes
    claim: int


@dataclass(slots=True, eq=False)
class ClaimRecord:
    """One claim, which follows `TABLE`."""

    key: ClaimKey
    peer: str
    """Whose it is: the same for all runs and links of one daemon."""
    request: Claim
    span: ClaimSpan | None
    """None if it is not traced."""
    state: State = TABLE.initial
    lease: "Lease | None" = None
    """The lease that it holds, or held to its fence."""
    error: KvdError = NOT_HELD
    """Why it was broken."""
    follows: int | None = None
    """How many parts of the offer its consumer knows, if it waits to be told of more."""
    told: int = 0
    """How many parts of the offer it has been told of."""

    def is_of(self, generation: int) -> bool:
        """Whether it holds the lease of this generation, or held it to its fence."""
        return self.lease is not None and self.lease.generation == generation

    def knows_all(self, fence: Fence) -> bool:
        """Whether the proof of a fence, or its own, is over all blocks of the offer, which has been closed."""
        proof = fence.proof or self.request.proof
        return self.lease is not None and hmac.compare_digest(proof, self.lease.content.proof)

    @property
    def offer(self) -> OfferKey:
        """The offer that it is about."""
        return (self.request.pool, self.request.offer)


class WaitingClaims:
    """Keeps the order in which they came. Those whose readers have left give their places to others."""

    def __init__(self) -> None:
        self._by_offer: dict[OfferKey, dict[ClaimKey, ClaimRecord]] = {}
        self._of_peer: Counter[str] = Counter()
        self._leaving: dict[str, dict[ClaimKey, ClaimRecord]] = {}
        """By peer, the oldest first."""

    def __len__(self) -> int:
        return self._of_peer.total()

    def put(self, claim: ClaimRecord) -> ClaimRecord | None:
        """Adds a claim. Returns the one whose place it got, if there was no other: its reader has left.

        Raises:
            Unavailable: `OVERLOADED`, too many wait already, of this peer or of all.

        """
        of_peer, of_all = self._of_peer[claim.peer], len(self)
        given_up = None
        if of_peer >= limits.MAX_CLAIMS_WAITING_PER_PEER or of_all >= limits.MAX_CLAIMS_WAITING:
            given_up = self._oldest_leaving(claim.peer, of_others=of_peer < limits.MAX_CLAIMS_WAITING_PER_PEER)
            if given_up is None:
                text = f"{of_peer} claims of this daemon and {of_all} in all wait for their offers; try again later"
                raise refusal(ErrorCode.OVERLOADED, text)
            self.discard(given_up)
        self._of_peer[claim.peer] += 1
        self._by_offer.setdefault(claim.offer, {})[claim.key] = claim
        if claim.state is State.LEAVING:
            self.leave(claim)
        return given_up

    def leave(self, claim: ClaimRecord) -> None:
        """The reader of a claim that waits has left."""
        self._leaving.setdefault(claim.peer, {})[claim.key] = claim

    def _oldest_leaving(self, peer: str, *, of_others: bool) -> ClaimRecord | None:
        leaving = self._leaving.get(peer, {})
        if not leaving and of_others:
            leaving = next(iter(self._leaving.values()), {})
        return next(iter(leaving.values()), None)

    def discard(self, claim: ClaimRecord) -> bool:
        """Takes a claim out; False if it does not wait, though a later one of its number may."""
        claims = self._by_offer.get(claim.offer, {})
        if claims.get(claim.key) is not claim:
            return False
        del claims[claim.key]
        if not claims:
            del self._by_offer[claim.offer]
        self._of_peer -= Counter([claim.peer])
        leaving = self._leaving.get(claim.peer, {})
        if leaving.pop(claim.key, None) is not None and not leaving:
            del self._leaving[claim.peer]
        return True

    def for_offer(self, offer: OfferKey) -> list[ClaimRecord]:
        """The claims that wait for this offer."""
        return list(self._by_offer.get(offer, {}).values())

    def all(self) -> list[ClaimRecord]:
        """All claims that wait."""
        return [claim for claims in self._by_offer.values() for claim in claims.values()]
