"""Whether the daemon is alive and ready.

The watchdog checks in rounds that the loop, every actor and the transport respond. An actor responds when the probe has
passed through its mailbox, the transport when NIXL's process, if there is one, has run the ping. After a round in which
one was silent, neither systemd's watchdog nor /livez is fed.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from kvd.actors.runtime.actor import Actor, Loop, call
from kvd.errors import InternalError
from kvd.metrics import Metrics

TRANSPORT: Final = "transport"
"""What the watchdog calls it, beside the actors' names."""

_PULSE_BOUND = 30.0
"""Seconds that a part may be silent before the daemon counts as dead: registering hundreds of GiB takes some."""

_log = structlog.get_logger("kvd.daemon.watchdog")


class Health:
    """Reasons not to be ready, by name; ready if there is none. Written by the loop, read by the HTTP thread."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._reasons: dict[str, str] = {"starting": "the daemon has not finished starting"}
        self._notes: dict[str, tuple[str, float]] = {}
        """What is wrong though the daemon is ready, by name, and since when."""
        self._pulse = time.monotonic()

    def set(self, name: str, reason: str | None) -> None:
        """Sets a reason not to be ready; None removes it."""
        reasons = {other: text for other, text in self._reasons.items() if other != name}
        if reason is not None:
            reasons[name] = reason
        self._reasons = reasons  # replaced whole: another thread reads it
        self._metrics.ready.set(not reasons)

    def note(self, name: str, text: str | None, seconds: float) -> None:
        """Notes what is wrong, for `seconds` already, though the daemon serves; None removes it."""
        notes = {other: note for other, note in self._notes.items() if other != name}
        if text is not None:
            notes[name] = (text, time.monotonic() - seconds)
        self._notes = notes

    def beat(self) -> None:
        """Notes that every part answered."""
        self._pulse = time.monotonic()

    @property
    def reasons(self) -> dict[str, str]:
        """Why the daemon is not ready; empty if it is."""
        return self._reasons

    def notes(self, most: int) -> list[str]:
        """At most `most` lines of what is wrong though the daemon is ready, the oldest first, and for how long."""
        now, notes = time.monotonic(), sorted(self._notes.items(), key=lambda item: item[1][1])
        return [f"{name}: for {now - since:.0f} s, {text}" for name, (text, since) in notes[:most]]

    @property
    def alive(self) -> bool:
        """Whether every part answered recently."""
        return time.monotonic() - self._pulse < _PULSE_BOUND


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
        """Begins a round, after which others follow."""
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
        self.start()
