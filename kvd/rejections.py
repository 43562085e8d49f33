"""What is done about those who are not let in: each attempt is counted, each culprit is logged once."""

from typing import Any, Final

from kvd.metrics import Metrics
from kvd.net.trust import Rejection

MAX_LOGGED: Final = 1024
"""Culprits that are remembered: an attacker draws a new key for nothing, and must not fill memory or disk."""


class Rejections:
    """Takes the rejections of one daemon. `log` is a structlog logger."""

    def __init__(self, metrics: Metrics, log: Any) -> None:
        self._metrics = metrics
        self._log = log
        self._logged: set[tuple[str, str]] = set()

    def __call__(self, rejection: Rejection) -> None:
        """Counts it; logs it if its culprit is new."""
        self._metrics.peers_rejected.labels(rejection.reason).inc()
        culprit = (rejection.reason, rejection.key)
        if culprit in self._logged or len(self._logged) >= MAX_LOGGED:
            return
        self._logged.add(culprit)
        self._log.warning("peer rejected", reason=rejection.reason, key=rejection.key, address=rejection.address)
        if len(self._logged) == MAX_LOGGED:
            self._log.warning("further rejections are counted only", metric="kvd_peers_rejected_total")
