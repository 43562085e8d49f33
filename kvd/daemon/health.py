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
        self._pulse = time.monotonic()

    def set(self, name: str, reason: str | None) -> None:
        """Sets a reason not to be ready; None removes it."""
        reasons = {other: text for other, text in self._reasons.items() if other != name}
        if reason is not None:
            reasons[name] = reason
        self._reasons = reasons  # replaced whole: another thread reads it
        self._metrics.ready.set(not reasons)

    def beat(self) -> None:
        """Notes that every part answered."""
        self._pulse = time.monotonic()

    @property
    def reasons(self) -> dict[str, str]:
        """Why the daemon is not ready; empty if it is."""
        return self._reasons

    @property
    def alive(self) -> bool:
        """Whether every part answered recently."""
        return time.monotonic() - self._pulse < _PULSE_BOUND
