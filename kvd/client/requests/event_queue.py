"""Events on their way to the worker. Pure: events in, events out."""

from collections.abc import Iterable

from kvd.client.events import Event, NotExtended, name_of


class EventQueue:
    """Events for the next `poll` or `wait`, except the answer to an offer for which a caller waits."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._names: set[str] = set()
        """What `_events` are about."""
        self._awaited: dict[str, list[Event]] = {}
        """Offers whose answer a caller waits for, and what has come of them."""

    def __contains__(self, request: str) -> bool:
        """Whether more of this pull or offer is to be told, here or to who made it: its name is not free yet."""
        return request in self._names or request in self._awaited

    def put(self, events: Iterable[Event]) -> None:
        """They have come about."""
        for event in events:
            name = name_of(event)
            if name in self._awaited and not isinstance(event, NotExtended):
                self._awaited[name].append(event)
            else:
                self._events.append(event)
                self._names.add(name)

    def take(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        self._names.clear()
        return events

    def await_answer(self, offer: str) -> None:
        """A caller waits for the answer to the offer made last: it is no event for others."""
        self._awaited[offer] = []

    def take_answer(self, offer: str) -> Event | None:
        """The answer to an offer that is awaited, once it is there."""
        come = self._awaited[offer]
        return come.pop(0) if come else None

    def end_await(self, offer: str) -> None:
        """Nobody waits for it any more: what has come of it since are events."""
        self.put(self._awaited.pop(offer))
