"""Events on their way from the transport's thread to the daemon's loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from kvd.transport.interface import Event


class Outbox:
    """A queue that one thread fills and the loop empties; a burst of events wakes the loop once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_event: Callable[[Event], None]) -> None:
        self._loop = loop
        self._on_event = on_event
        self._events: deque[Event] = deque()
        self._woken = False
        self._closed = False

    def put(self, event: Event) -> None:
        """Any thread: `event` is delivered on the loop, after all that were put before it."""
        if self._closed:
            return
        self._events.append(event)
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    def close(self) -> None:
        """On the loop: what was not delivered is dropped."""
        self._closed = True

    def _deliver(self) -> None:
        self._woken = False  # before the queue is looked at: an event that comes after that wakes the loop again
        try:
            while self._events and not self._closed:
                self._on_event(self._events.popleft())
        finally:
            if self._events and not self._closed:  # the handler raised, which must not hold up the events after it
                self._woken = True
                self._loop.call_soon(self._deliver)
