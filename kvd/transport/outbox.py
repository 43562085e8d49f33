"""Events on their way from the threads that copy to the daemon's loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from kvd.transport.interface import Event


class Outbox:
    """A queue that the transport's thread fills and the loop empties.

    After a wake-up the loop holds the interpreter's lock for as long as it runs, so a burst of events costs only one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_event: Callable[[Event], None]) -> None:
        self._loop = loop
        self._on_event = on_event
        self._events: deque[Event] = deque()
        self._woken = False
        self._closed = False

    def put(self, event: Event) -> None:
        """On the thread: queues `event` behind those queued before it, and wakes the loop."""
        self._events.append(event)
        if not self._woken and not self._closed:
            self._woken = True
            self._loop.call_soon_threadsafe(self.deliver)

    def close(self) -> None:
        """On the loop: drops what was not delivered, now and later."""
        self._closed = True

    def deliver(self) -> None:
        """On the loop: delivers the queued events."""
        self._woken = (
            False  # first, so that an event which arrives after the queue was found empty wakes the loop again
        )
        try:
            while self._events and not self._closed:
                self._on_event(self._events.popleft())
        finally:
            if self._events and not self._closed:  # the handler raised; later events must not wait for that
                self._woken = True
                self._loop.call_soon(self.deliver)
