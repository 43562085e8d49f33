"""Whether the daemon lives and whether it takes new work; written by the loop, read by the HTTP thread."""

import time

from kvd.metrics import Metrics

_PULSE_BOUND = 30.0
"""Seconds without an answer of every part after which the daemon does not count as alive. Registering hundreds of GiB
occupies the transport's thread for seconds."""


class Health:
    """Reasons not to be ready by name; ready when there is none."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._reasons: dict[str, str] = {"starting": "the daemon has not finished starting"}
        self._pulse = time.monotonic()

    def set(self, name: str, reason: str | None) -> None:
        """Notes a reason not to be ready, or with None that it is gone."""
        reasons = {other: text for other, text in self._reasons.items() if other != name}
        if reason is not None:
            reasons[name] = reason
        self._reasons = reasons  # replaced whole: another thread reads it
        self._metrics.ready.set(not reasons)

    def beat(self) -> None:
        """Every part answered."""
        self._pulse = time.monotonic()

    @property
    def reasons(self) -> dict[str, str]:
        """Why the daemon is not ready; empty when it is."""
        return self._reasons

    @property
    def alive(self) -> bool:
        """Whether every part answered lately."""
        return time.monotonic() - self._pulse < _PULSE_BOUND
