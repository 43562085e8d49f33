"""Whether the daemon is alive and ready; written by the loop, read by the HTTP thread."""

import time

from kvd.metrics import Metrics

_PULSE_BOUND = 30.0
"""Seconds that a part may be silent before the daemon counts as dead: registering hundreds of GiB takes some."""


class Health:
    """Reasons not to be ready, by name; ready if there is none."""

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
