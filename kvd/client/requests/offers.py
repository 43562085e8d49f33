"""A worker's open offers. Pure: events in, events out.

An offer's blocks are the worker's again only once the daemon says so or its process has ended. An offer whose answer
was lost is withdrawn, and stays open until the daemon answers that.
"""

from enum import Enum, auto

from kvd.client.events import Event, NotExtended, Offered, OfferRefused, Released
from kvd.errors import ErrorCode

LOST_ANSWER = "the daemon's answer was lost and the offer is withdrawn; make it again under another name"


class _State(Enum):
    SENT = auto()
    ACCEPTED = auto()


class Offers:
    """Every offer between its request and its last event."""

    def __init__(self) -> None:
        self._offers: dict[str, _State] = {}

    def __contains__(self, offer: str) -> bool:
        return offer in self._offers

    def __len__(self) -> int:
        return len(self._offers)

    def add(self, offer: str) -> None:
        """An offer was sent."""
        self._offers[offer] = _State.SENT

    def unanswered(self) -> list[str]:
        """Offers that the daemon has not answered yet."""
        return [offer for offer, state in self._offers.items() if state is _State.SENT]

    def offered(self, offer: str, ticket: str) -> list[Event]:
        """The daemon accepted it."""
        if self._offers.get(offer) is not _State.SENT:
            return []
        self._offers[offer] = _State.ACCEPTED
        return [Offered(offer, ticket)]

    def refused(self, offer: str, code: str, text: str) -> list[Event]:
        """The daemon refused it."""
        return [] if self._offers.pop(offer, None) is None else [OfferRefused(offer, code, text)]

    def not_extended(self, offer: str, code: str, text: str) -> list[Event]:
        """The daemon refused to extend or close it, and not because it has ended, which is told separately."""
        gone = offer not in self._offers or code in (ErrorCode.OFFER_GONE, ErrorCode.UNKNOWN_REQUEST)
        return [] if gone else [NotExtended(offer, code, text)]

    def unknown(self, offer: str) -> list[Event]:
        """The daemon has no such offer, and all its notifications about it have arrived: it was refused, or lost."""
        if self._offers.get(offer) is not _State.SENT:
            return []
        return self.refused(offer, ErrorCode.DAEMON_LOST, LOST_ANSWER)

    def released(self, offer: str, reason: str) -> list[Event]:
        """The daemon ended it."""
        return [] if self._offers.pop(offer, None) is None else [Released(offer, reason)]

    def daemon_gone(self) -> list[Event]:
        """The daemon's process has ended, and every lease with it."""
        events: list[Event] = []
        for offer, state in self._offers.items():
            if state is _State.ACCEPTED:
                events.append(Released(offer, "daemon lost"))
            else:
                events.append(OfferRefused(offer, ErrorCode.DAEMON_LOST, "the daemon died; make the offer again"))
        self._offers.clear()
        return events
