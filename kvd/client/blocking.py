"""The client for workers without an asyncio loop."""

import contextlib
from collections.abc import Iterable
from functools import partial
from typing import Any, Self, TypeVar, cast

from kvd.client.driver import Driver
from kvd.client.events import Blocks, Event
from kvd.client.session import Spec
from kvd.client.waits import WaitingSession, Waits

T = TypeVar("T")


class Worker(WaitingSession):
    """A worker's session with its daemon; made by `attach`. One thread, one process; also a context manager."""

    @classmethod
    def attach(cls, socket_path: str, *, name: str, spec: Spec, timeout: float = 10.0) -> Self:
        """Attaches as `name` and maps the pool that `spec` describes; waits for a daemon that is still starting.

        Raises:
            BadRequest: the daemon refused: `BAD_SPEC`, `BAD_VERSION`, `NOT_PERMITTED`, ...; `BAD_CONFIG`, the path is
                too long for a socket.
            Unavailable: not attached within `timeout` seconds: `DAEMON_LOST`, nobody answers; else the last refusal
                (`POOL_BUSY`, another process has this name; `OVERLOADED`, not enough memory).

        """
        worker = cls(Driver(socket_path, name, spec.encode(), spec.pool_bytes))
        worker._run(worker._attaching(timeout))
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
        request = partial(self.offer_nowait, offer, tokens=tokens, blocks=blocks, ttl=ttl, consumers=consumers)
        return self._run(self._offering(offer, request, timeout))

    def open_offer(self, offer: str, *, ttl: float, consumers: int = 1, timeout: float = 10.0) -> str:
        """Opens an offer that grows and returns its ticket (see `open_offer_nowait`). Other events wait for `poll`.

        Raises:
            KvdError: as `offer`.

        """
        request = partial(self.open_offer_nowait, offer, ttl=ttl, consumers=consumers)
        return self._run(self._offering(offer, request, timeout))

    def status(self, timeout: float = 10.0) -> dict[str, Any]:
        """The daemon's status: the fields of `kvd.protocol.status.StatusReport`.

        Raises:
            Unavailable: `DAEMON_LOST`, the daemon cannot be reached; `DEADLINE`, no answer within `timeout` seconds.
            BadRequest: `BAD_MESSAGE`, the answer is no status of this release.

        """
        return self._run(self._asking_status(timeout))

    def wait(self, timeout: float) -> list[Event]:
        """Like `poll`, but waits up to `timeout` seconds for the first event.

        Raises:
            BadRequest: `WRONG_STATE`, the worker is closed, and all events were taken.

        """
        return self._run(self._waiting(timeout))

    def detach(self, timeout: float = 10.0) -> None:
        """Gives the pool back and closes. Returns once nothing reads from the pool or writes to it.

        Raises:
            Unavailable: `DEADLINE`, transfers still use the pool; `DAEMON_LOST`, the daemon cannot be reached. The
                session is closed all the same.

        """
        self._run(self._detaching(timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, steps: Waits[T]) -> T:
        with contextlib.closing(steps):
            while True:
                try:
                    until = next(steps)
                except StopIteration as end:
                    return cast("T", end.value)
                self._driver.wait_readable(until)
