"""The notifications of a daemon: taken once each and in order, and acknowledged when the worker has had them.

They carry sequence numbers, from 1 within one tenancy. What comes twice is dropped, and so is what comes too early: the
daemon sends that again. If the gap does not close in time, `is_lost` says so, and the client attaches again: then the
daemon sends all that is not acknowledged. What one `poll` returned is acknowledged by a later one, with what came until
then.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Final

from kvd import limits
from kvd.client.events import Event, NotExtended, name_of
from kvd.protocol.worker import Notification, Notifications

GAP_SECONDS: Final = 1.0
"""How long a notification may be missing before the client attaches again; the daemon repeats within 0.05 s."""

ACKNOWLEDGE_SECONDS: Final = 0.02
ACKNOWLEDGE_EVERY: Final = 64
"""An acknowledgement waits for this long or for this many notifications: one for each would double the messages."""


class Inbox:
    """Counts in sequence numbers; times are in seconds on the caller's clock."""

    def __init__(self) -> None:
        self.expected = 1
        """The notification that comes next."""
        self._handed_out = 0
        self._acknowledged = 0
        self._acknowledge_at = math.inf
        self._gap_since = math.inf

    def begin_anew(self) -> None:
        """They are numbered from 1 again."""
        self.expected, self._handed_out, self._acknowledged = 1, 0, 0

    def forgive(self) -> None:
        """What is missing is sent again, as this is another session."""
        self._gap_since = math.inf

    def take(self, batch: Notifications, now: float) -> Iterator[Notification]:
        """The notifications that are new, each taken as it comes out; none if one before them is missing."""
        if batch.first > self.expected:
            self._gap_since = min(self._gap_since, now)
            return
        if not self._owes:
            self._acknowledge_at = now + ACKNOWLEDGE_SECONDS
        self._acknowledged = min(self._acknowledged, batch.first - 1)  # a repeated notification was lost with a session
        self._gap_since = math.inf
        for item in batch.items[self.expected - batch.first :]:
            self.expected += 1
            yield item

    def hand_out(self) -> None:
        """The worker has all that was taken."""
        self._handed_out = self.expected - 1

    def acknowledgement(self, now: float) -> int | None:
        """What to acknowledge now, if it is time: all up to this one."""
        unacknowledged = self._handed_out - self._acknowledged
        if not self._owes or (now < self._acknowledge_at and unacknowledged < ACKNOWLEDGE_EVERY):
            return None
        self._acknowledged, self._acknowledge_at = self._handed_out, now + ACKNOWLEDGE_SECONDS
        return self._handed_out

    @property
    def next_timer(self) -> float:
        """When `acknowledgement` or `is_lost` has something to say; infinite if never."""
        return min(self._gap_since + GAP_SECONDS, self._acknowledge_at if self._owes else math.inf)

    def is_lost(self, now: float) -> bool:
        """Whether one is missing that the daemon did not send again."""
        return now >= self._gap_since + GAP_SECONDS

    @property
    def _owes(self) -> bool:
        return self._handed_out > self._acknowledged


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


class Reading:
    """Until when all that came has been read. Times are monotonic seconds on the caller's clock.

    After a standstill of this process or its engine, what came in time may wait in a socket: it gets a moment. If every
    step follows one, what was there at the last step has been read now.
    """

    def __init__(self) -> None:
        self.until = 0.0
        """All that had come by then is read for sure."""
        self.next_at = 0.0
        """When that can be said of a later time."""
        self._stepped_at = 0.0

    def step(self, now: float, *, unread: bool) -> None:
        """What there was has been read, except what is still `unread`."""
        before, self._stepped_at = self._stepped_at, now
        if unread:
            self.next_at = now + limits.LAST_LOOK_SECONDS
        elif now - before > limits.STANDSTILL_SECONDS:
            self.until, self.next_at = before, now + limits.LAST_LOOK_SECONDS
        elif now >= self.next_at:
            self.until = now
