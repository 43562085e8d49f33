"""What waits for an answer of the daemon, but for how to wait: the blocking and the asyncio client have that.

Each is a generator that yields whenever it has to wait: go on with it when something is readable, or at the time that
it yields (`time.monotonic`). Its return value is the answer.
"""

import math
import time
from collections.abc import Callable, Generator
from typing import Any, TypeVar, cast

import msgspec

from kvd.client.events import Event, Offered, OfferRefused, Released
from kvd.client.session import Session
from kvd.errors import ErrorCode, error_from_code, refusal
from kvd.protocol.status import decode

T = TypeVar("T")
Waits = Generator[float, None, T]
"""See the module's text."""


class WaitingSession(Session):
    """A session whose requests can be waited for."""

    def _attaching(self, timeout: float) -> Waits[None]:
        attached = None
        try:
            attached = yield from self._until(self._take_attached, self._deadline(timeout))
        finally:
            if attached is None:
                self.close()
        if attached is None:
            raise self._driver.no_answer(timeout)

    def _offering(self, offer: str, request: Callable[[], None], timeout: float) -> Waits[str]:
        """The ticket of the offer that `request` makes."""
        until = self._deadline(timeout)
        request()
        self._driver.core.events.await_answer(offer)
        answer = None
        try:
            answer = yield from self._until(lambda: self._take_answer(offer), until)
        finally:  # also of a call that is cancelled: nobody would know that its offer stands
            self._driver.end_await(offer, answered=answer is not None)
        match answer:
            case Offered(_, ticket):
                return ticket
            case OfferRefused(_, code, text):
                raise error_from_code(code, text)
            case Released(_, reason):
                text = f"the daemon's answer was lost, and the offer {offer!r} has ended ({reason}); make it again"
                raise refusal(ErrorCode.DAEMON_LOST, f"{text} under another name")
            case _:
                text = f"no answer to the offer {offer!r} within {timeout} s; it is withdrawn, and poll() tells its end"
                raise refusal(ErrorCode.DEADLINE, text)

    def _asking_status(self, timeout: float) -> Waits[dict[str, Any]]:
        until = self._deadline(timeout)
        self._driver.check()
        call, frame = self._driver.core.status()
        self._driver.request(frame)
        try:
            report = yield from self._until(lambda: self._driver.core.status_answer(call), until)
        finally:
            self._driver.core.abandon_status(call)
        if report is None:
            raise refusal(ErrorCode.DEADLINE, f"no status within {timeout} s")
        return cast("dict[str, Any]", msgspec.to_builtins(decode(report)))

    def _waiting(self, timeout: float) -> Waits[list[Event]]:
        return (yield from self._until(self._take_events, self._deadline(timeout))) or []

    def _detaching(self, timeout: float) -> Waits[None]:
        until = self._deadline(timeout)
        try:
            self._driver.detach()
            if (yield from self._until(self._take_detached, until)) is None:
                raise refusal(ErrorCode.DEADLINE, f"the pool was not given back within {timeout} s")
        finally:
            self.close()

    @staticmethod
    def _deadline(timeout: float) -> float:
        """When `timeout` seconds from now are over.

        Raises:
            BadRequest: `BAD_MESSAGE`, it is not a number, which no time ever reaches.

        """
        if not isinstance(timeout, int | float) or math.isnan(timeout):
            raise refusal(ErrorCode.BAD_MESSAGE, f"the timeout ({timeout!r}) is not a number; give it in seconds")
        return time.monotonic() + timeout

    def _until(self, take: Callable[[], T | None], until: float) -> Waits[T | None]:
        """What `take` returns once it does; None if that is not until then."""
        while True:
            now = time.monotonic()
            self._step(now)
            if (taken := take()) is not None:
                return taken
            if now >= until:
                return None
            yield until

    def _take_attached(self) -> bool | None:
        self._driver.check()
        return self._driver.connected or None

    def _take_events(self) -> list[Event] | None:
        events = self._driver.core.take_events()
        if not events and self._driver.closed:  # there will be none
            self._driver.check()
        return events or None

    def _take_answer(self, offer: str) -> Event | None:
        self._driver.check()
        return self._driver.core.events.take_answer(offer)

    def _take_detached(self) -> bool | None:
        if self._driver.detached:
            return True
        if not self._driver.connected:
            raise refusal(ErrorCode.DAEMON_LOST, "the daemon is gone, and the pool with it")
        return None
