"""The client for workers with an asyncio loop."""

import asyncio
import contextlib
import math
import time
from collections.abc import Iterable
from functools import partial
from typing import Any, Self, TypeVar, cast

from kvd.client.driver import UNSENT_SECONDS, Driver
from kvd.client.events import Blocks, Event
from kvd.client.session import Spec
from kvd.client.waits import WaitingSession, Waits
from kvd.net.unix import ReadWatch

T = TypeVar("T")


class AsyncWorker(WaitingSession):
    """Like `Worker`, on the running loop, which also attaches again after a loss while nobody polls."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self._loop = asyncio.get_running_loop()
        self._watches: list[ReadWatch] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._waiters: set[asyncio.Future[None]] = set()
        driver.on_descriptors = self._watch
        driver.on_request = lambda: self._turn_at(0.0)  # others may be waiting

    @classmethod
    async def attach(cls, socket_path: str, *, name: str, spec: Spec, timeout: float = 10.0) -> Self:  # noqa: ASYNC109
        """Like `Worker.attach`, without blocking the loop."""
        worker = cls(Driver(socket_path, name, spec.encode(), spec.pool_bytes))
        await worker._run(worker._attaching(timeout))
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
        request = partial(self.offer_nowait, offer, tokens=tokens, blocks=blocks, ttl=ttl, consumers=consumers)
        return await self._run(self._offering(offer, request, timeout))

    async def open_offer(
        self,
        offer: str,
        *,
        ttl: float,
        consumers: int = 1,
        timeout: float = 10.0,  # noqa: ASYNC109
    ) -> str:
        """Like `Worker.open_offer`."""
        request = partial(self.open_offer_nowait, offer, ttl=ttl, consumers=consumers)
        return await self._run(self._offering(offer, request, timeout))

    async def status(self, timeout: float = 10.0) -> dict[str, Any]:  # noqa: ASYNC109
        """Like `Worker.status`."""
        return await self._run(self._asking_status(timeout))

    async def wait(self, timeout: float) -> list[Event]:  # noqa: ASYNC109
        """Like `Worker.wait`."""
        return await self._run(self._waiting(timeout))

    async def detach(self, timeout: float = 10.0) -> None:  # noqa: ASYNC109
        """Like `Worker.detach`."""
        await self._run(self._detaching(timeout))

    def close(self) -> None:
        """Like `Worker.close`; cancels those who wait."""
        if self._driver.closed:
            return
        self._watch(())
        if self._timer is not None:
            self._timer.cancel()
        for waiter in self._waiters:
            waiter.cancel()
        self._driver.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def _run(self, steps: Waits[T]) -> T:
        with contextlib.closing(steps):
            while True:
                try:
                    until = next(steps)
                except StopIteration as end:
                    return cast("T", end.value)
                await self._readable(until)

    async def _readable(self, until: float) -> None:
        """Waits until there is something to do, or until `until`."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.add(waiter)
        handle = self._loop.call_later(until - time.monotonic(), _set, waiter)
        try:
            await waiter
        finally:
            handle.cancel()
            self._waiters.discard(waiter)

    def _turn(self) -> None:
        """Something is readable."""
        self._step(time.monotonic())
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            _set(waiter)

    def _time_out(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self._turn()

    def _step(self, now: float) -> None:
        if self._driver.step(now):  # what came may be for others, and makes no descriptor readable again
            self._wake()
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
        for watch in self._watches:
            watch.stop()
        self._watches = [ReadWatch(fileno, self._turn, self._loop) for fileno in filenos]
        for watch in self._watches:
            watch.start()


def _set(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
