"""Counts every daemon that is refused, and logs each offender once."""

from typing import Any

from kvd.actors.runtime.pace import WarnOnce
from kvd.metrics import Metrics
from kvd.net.trust import Rejection


class Rejections:
    """Handles one daemon's rejections. `log` is a structlog logger."""

    def __init__(self, metrics: Metrics, log: Any) -> None:
        self._metrics = metrics
        self._once = WarnOnce(log, "kvd_peers_rejected_total")

    def __call__(self, rejection: Rejection) -> None:
        """Counts the rejection, and logs it if the offender is new."""
        self._metrics.peers_rejected.labels(rejection.reason).inc()
        self._once.warn(
            "peer rejected",
            rejection.reason,
            rejection.key,
            reason=rejection.reason,
            key=rejection.key,
            address=rejection.address,
        )
