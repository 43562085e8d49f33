"""The watchdog: checks in rounds that the loop, every actor and the transport respond.

An actor responds when the probe has passed through its mailbox, the transport when NIXL's process, if there is one, has
run the ping. After a round in which one was silent, neither systemd's watchdog nor /livez is fed.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from kvd.actors.runtime.actor import Actor, Loop, call
from kvd.errors import InternalError
from kvd.metrics import Metrics

TRANSPORT: Final = "transport"
_log = structlog.get_logger("kvd.daemon.watchdog")


class Watchdog:
    """Runs rounds `interval` seconds apart; calls `fed` in each when all have responded."""

    def __init__(
        self,
        loop: Loop,
        interval: float,
        *,
        actors: Sequence[Actor],
        ping: Callable[[int], None],
        fed: Callable[[], None],
        metrics: Metrics,
    ) -> None:
        self._loop = loop
        self._interval = interval
        self._actors = actors
        self._ping = ping
        self._fed = fed
        self._metrics = metrics
        self._round = 0
        self._began = 0.0
        self._silent: set[str] = set()

    def start(self) -> None:
        """Begins the first round."""
        self._begin()

    def _begin(self) -> None:
        self._round += 1
        self._began = self._loop.time()
        self._silent = {TRANSPORT, *(actor.name for actor in self._actors)}
        number = self._round
        self._loop.call_later(self._interval, self._end)
        for actor in self._actors:
            self._metrics.mailbox.labels(actor.name).set(actor.waiting)
            with contextlib.suppress(InternalError):  # its mailbox is full: it is silent in this round
                call(actor.probe, lambda name: self._answered(number, name))
        self._ping(number)

    def transport_answered(self, number: int) -> None:
        """The transport ran ping `number`."""
        self._answered(number, TRANSPORT)

    def _answered(self, number: int, name: str) -> None:
        if number != self._round or name not in self._silent:
            return
        self._silent.discard(name)
        self._metrics.probe_seconds.labels(name).set(self._loop.time() - self._began)
        if not self._silent:
            self._fed()

    def _end(self) -> None:
        for name in sorted(self._silent):
            self._metrics.watchdog_misses.labels(name).inc()
            _log.warning("silent", part=name, seconds=round(self._loop.time() - self._began, 3))
        self._begin()
