"""Events on their way from the transport's thread to the daemon's loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from kvd.transport.interface import Event


class Outbox:
    """A queue that one thread fills and the loop empties.

    `put` does not wake the loop, `flush` does: each wake-up takes the interpreter's lock from the thread for as long as
    the loop runs, so a burst of events should cost one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_event: Callable[[Event], None]) -> None:
        self._loop = loop
        self._on_event = on_event
        self._events: deque[Event] = deque()
        self._woken = False
        self._closed = False

    def put(self, event: Event) -> None:
        """On the thread: `event` is delivered after the next `flush`, and after all that were put before it."""
        self._events.append(event)

    def flush(self) -> None:
        """On the thread: wakes the loop if there is something to deliver."""
        if self._events and not self._woken and not self._closed:
            self._woken = True
            self._loop.call_soon_threadsafe(self.deliver)

    def close(self) -> None:
        """On the loop: what was not delivered is dropped."""
        self._closed = True

    def deliver(self) -> None:
        """On the loop: delivers what was put until now."""
        self._woken = False  # before the queue is looked at: an event that comes after that wakes the loop again
        try:
            while self._events and not self._closed:
                self._on_event(self._events.popleft())
        finally:
            if self._events and not self._closed:  # the handler raised, which must not hold up the events after it
                self._woken = True
                self._loop.call_soon(self.deliver)
