"""Between the threads of transports and the daemon's loop: events and results on their way to it, calls there."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import structlog

from kvd.errors import ErrorCode, KvdError, refusal
from kvd.transport.interface import Event

T = TypeVar("T")

_log = structlog.get_logger("kvd.transport")


def on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], T]) -> T:
    """Makes a call on the thread of `loop`, which must run, and waits for it: what it returns, or raises.

    On that thread the call is made at once.
    """
    try:
        here = asyncio.get_running_loop() is loop
    except RuntimeError:
        here = False
    if here:
        return call()

    async def made() -> T:
        return call()

    return asyncio.run_coroutine_threadsafe(made(), loop).result()


def outcome(ended: asyncio.Future[T], what: str, **context: str) -> T | KvdError:
    """What a thread returned, or why it returned nothing; what it should not have raised is logged, as `what`."""
    error = ended.exception()
    if error is None:
        return ended.result()
    if isinstance(error, KvdError):
        return error
    _log.error(what, **context, exc_info=error)
    return refusal(ErrorCode.INTERNAL, f"internal {type(error).__name__}; see the daemon's log")


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
        # First, so that an event which arrives after the queue was found empty wakes the loop again.
        self._woken = False
        try:
            while self._events and not self._closed:
                self._on_event(self._events.popleft())
        finally:
            if self._events and not self._closed:  # the handler raised; later events must not wait for that
                self._woken = True
                self._loop.call_soon(self.deliver)
