"""The client for workers with an asyncio loop."""

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

from kvd.client.blocks import Blocks
from kvd.client.driver import Driver
from kvd.client.events import Event
from kvd.client.session import Session, Spec
from kvd.errors import ErrorCode, refusal

T = TypeVar("T")

UNSENT_SECONDS = 0.01
"""How soon to try again what a full queue did not take."""


class AsyncWorker(Session):
    """Like `Worker`, on the running loop, which also attaches again after a loss while nobody polls."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self._loop = asyncio.get_running_loop()
        self._watched: tuple[int, ...] = ()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._waiters: set[asyncio.Future[None]] = set()
        self._closed = False
        driver.on_descriptors = self._watch
        driver.on_request = lambda: self._turn_at(0.0)  # others may be waiting

    @classmethod
    async def attach(cls, socket_path: str, *, name: str, spec: Spec, timeout: float = 10.0) -> Self:  # noqa: ASYNC109
        """Like `Worker.attach`, without blocking the loop."""
        driver = Driver(socket_path, name, spec.encode(), spec.pool_bytes)
        worker = cls(driver)
        attached = None
        try:
            attached = await worker._until(worker._take_attached, worker._deadline(timeout))
        finally:
            if attached is None:
                worker.close()
        if attached is None:
            raise driver.no_answer(timeout)
        return worker

    async def offer(
        self,
        offer: str,
        *,
        tokens: int,
        blocks: Iterable[Blocks],
        ttl: float,
        consumers: int = 1,
        timeout: float = 10.0,  # noqa: ASYNC109
    ) -> str:
        """Like `Worker.offer`."""
        until = self._deadline(timeout)
        self.offer_nowait(offer, tokens=tokens, blocks=blocks, ttl=ttl, consumers=consumers)
        ticket = await self._until(lambda: self._take_offer(offer), until)
        if ticket is None:
            raise self._offer_overdue(offer, timeout)
        return ticket

    async def open_offer(
        self,
        offer: str,
        *,
        ttl: float,
        consumers: int = 1,
        timeout: float = 10.0,  # noqa: ASYNC109
    ) -> str:
        """Like `Worker.open_offer`."""
        until = self._deadline(timeout)
        self.open_offer_nowait(offer, ttl=ttl, consumers=consumers)
        ticket = await self._until(lambda: self._take_offer(offer), until)
        if ticket is None:
            raise self._offer_overdue(offer, timeout)
        return ticket

    async def status(self, timeout: float = 10.0) -> dict[str, Any]:  # noqa: ASYNC109
        """Like `Worker.status`."""
        until, call = self._deadline(timeout), self._request_status()
        try:
            report = await self._until(lambda: self._take_status(call), until)
        finally:
            self._driver.core.abandon_status(call)
        if report is None:
            raise refusal(ErrorCode.DEADLINE, f"no status within {timeout} s")
        return report

    async def wait(self, timeout: float) -> list[Event]:  # noqa: ASYNC109
        """Like `Worker.wait`."""
        return await self._until(lambda: self._driver.core.take_events() or None, self._deadline(timeout)) or []

    async def detach(self, timeout: float = 10.0) -> None:  # noqa: ASYNC109
        """Like `Worker.detach`."""
        until = self._deadline(timeout)
        try:
            self._driver.detach()
            if await self._until(self._take_detached, until) is None:
                raise refusal(ErrorCode.DEADLINE, f"the pool was not given back within {timeout} s")
        finally:
            self.close()

    def close(self) -> None:
        """Like `Worker.close`; cancels those who wait."""
        if self._closed:
            return
        self._closed = True
        self._watch(())
        if self._timer is not None:
            self._timer.cancel()
        for waiter in self._waiters:
            waiter.cancel()
        self._driver.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def poll(self) -> list[Event]:
        """Like `Worker.poll`."""
        self._step(time.monotonic())
        return self._driver.core.take_events()

    async def _until(self, take: Callable[[], T | None], until: float) -> T | None:
        while True:
            now = time.monotonic()
            self._step(now)
            if (taken := take()) is not None:
                return taken
            if now >= until:
                return None
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters.add(waiter)
            handle = self._loop.call_later(until - now, _set, waiter)
            try:
                await waiter
            finally:
                handle.cancel()
                self._waiters.discard(waiter)

    def _turn(self) -> None:
        """Something is readable."""
        self._step(time.monotonic())
        for waiter in self._waiters:
            _set(waiter)

    def _time_out(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self._turn()

    def _step(self, now: float) -> None:
        self._driver.step(now)
        due = now if self._driver.unread else self._driver.next_timer()
        if self._driver.unsent:
            due = min(due, now + UNSENT_SECONDS)
        self._turn_at(due)

    def _turn_at(self, due: float) -> None:
        if due < self._timer_at:  # an early timer is harmless, and cheaper than setting a new one each time
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._timer_at = self._loop.call_later(max(due - time.monotonic(), 0.0), self._time_out), due

    def _watch(self, filenos: tuple[int, ...]) -> None:
        for fileno in self._watched:
            self._loop.remove_reader(fileno)
        for fileno in filenos:
            self._loop.add_reader(fileno, self._turn)
        self._watched = filenos


def _set(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
