"""What is done about daemons that are not let in: each attempt is counted, each culprit is logged once."""

from typing import Any

from kvd.actors.runtime.warn_once import WarnOnce
from kvd.metrics import Metrics
from kvd.net.trust import Rejection


class Rejections:
    """Takes the rejections of one daemon. `log` is a structlog logger."""

    def __init__(self, metrics: Metrics, log: Any) -> None:
        self._metrics = metrics
        self._once = WarnOnce(log, "kvd_peers_rejected_total")

    def __call__(self, rejection: Rejection) -> None:
        """Counts it; logs it if its culprit is new."""
        self._metrics.peers_rejected.labels(rejection.reason).inc()
        self._once.warn(
            "peer rejected",
            rejection.reason,
            rejection.key,
            reason=rejection.reason,
            key=rejection.key,
            address=rejection.address,
        )
