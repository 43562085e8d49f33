"""The client for workers without an asyncio loop."""

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


class Worker(Session):
    """A worker's session with its daemon; made by `attach`. One thread, one process; also a context manager."""

    @classmethod
    def attach(cls, socket_path: str, *, name: str, spec: Spec, timeout: float = 10.0) -> Self:
        """Attaches as `name` and maps the pool that `spec` describes; waits for a daemon that is still starting.

        Raises:
            BadRequest: the daemon refused: `BAD_SPEC`, `BAD_VERSION`, `NOT_PERMITTED`, ...
            Unavailable: not attached within `timeout` seconds: `DAEMON_LOST`, nobody answers; else the last refusal
                (`POOL_BUSY`, another process has this name; `OVERLOADED`, not enough memory).

        """
        driver = Driver(socket_path, name, spec.encode(), spec.pool_bytes)
        worker = cls(driver)
        attached = None
        try:
            attached = worker._until(worker._take_attached, worker._deadline(timeout))
        finally:
            if attached is None:
                worker.close()
        if attached is None:
            raise driver.no_answer(timeout)
        return worker

    def offer(
        self,
        offer: str,
        *,
        tokens: int,
        blocks: Iterable[Blocks],
        ttl: float,
        consumers: int = 1,
        timeout: float = 10.0,
    ) -> str:
        """Offers blocks of a sequence of `tokens` tokens for `ttl` seconds and returns the ticket for its `consumers`.

        It ends when that many consumers have read it, each with all its ranks; with 0, only when it expires or is
        cancelled. Do not write to the blocks until `poll` returns `Released`. Other events wait for `poll`.

        Raises:
            KvdError: as `offer_nowait`; or the daemon refused.
            Unavailable: `DEADLINE`, no answer within `timeout` seconds; the offer is withdrawn, and `poll`
                returns either `OfferRefused` or `Released`.

        """
        until = self._deadline(timeout)
        self.offer_nowait(offer, tokens=tokens, blocks=blocks, ttl=ttl, consumers=consumers)
        ticket = self._until(lambda: self._take_offer(offer), until)
        if ticket is None:
            raise self._offer_overdue(offer, timeout)
        return ticket

    def open_offer(self, offer: str, *, ttl: float, consumers: int = 1, timeout: float = 10.0) -> str:
        """Opens an offer that grows and returns its ticket (see `open_offer_nowait`). Other events wait for `poll`.

        Raises:
            KvdError: as `offer`.

        """
        until = self._deadline(timeout)
        self.open_offer_nowait(offer, ttl=ttl, consumers=consumers)
        ticket = self._until(lambda: self._take_offer(offer), until)
        if ticket is None:
            raise self._offer_overdue(offer, timeout)
        return ticket

    def status(self, timeout: float = 10.0) -> dict[str, Any]:
        """The daemon's status, from its JSON.

        Raises:
            Unavailable: `DAEMON_LOST`, the daemon cannot be reached; `DEADLINE`, no answer within `timeout` seconds.

        """
        until, call = self._deadline(timeout), self._request_status()
        try:
            report = self._until(lambda: self._take_status(call), until)
        finally:
            self._driver.core.abandon_status(call)
        if report is None:
            raise refusal(ErrorCode.DEADLINE, f"no status within {timeout} s")
        return report

    def wait(self, timeout: float) -> list[Event]:
        """Like `poll`, but waits up to `timeout` seconds for the first event."""
        return self._until(lambda: self._driver.core.take_events() or None, self._deadline(timeout)) or []

    def detach(self, timeout: float = 10.0) -> None:
        """Gives the pool back and closes. Returns once nothing reads from the pool or writes to it.

        Raises:
            Unavailable: `DEADLINE`, transfers still use the pool; `DAEMON_LOST`, the daemon cannot be reached. The
                session is closed all the same.

        """
        until = self._deadline(timeout)
        try:
            self._driver.detach()
            if self._until(self._take_detached, until) is None:
                raise refusal(ErrorCode.DEADLINE, f"the pool was not given back within {timeout} s")
        finally:
            self.close()

    def close(self) -> None:
        """Ends the session; the daemon keeps the pool and its bytes for the next process with this name.

        Another process gets them only when this one has ended, since this one could still write to them.

        Memory that tensors use stays mapped until they are gone. A second call does nothing.
        """
        self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _until(self, take: Callable[[], T | None], until: float) -> T | None:
        while True:
            now = time.monotonic()
            self._driver.step(now)
            if (taken := take()) is not None:
                return taken
            if now >= until:
                return None
            self._driver.wait_readable(until)
