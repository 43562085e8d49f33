"""Metrics as text for Prometheus, for whoever asks, however often and however oddly."""

import time
from collections import deque

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.exposition import generate_latest as plain
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE_OPENMETRICS
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics

from kvd import limits


class Exposition:
    """The text of a registry. Writing it takes milliseconds of the interpreter, which the daemon's loop waits for."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._last: dict[str, bytes] = {}
        """The latest text, by content type."""
        self._written: deque[float] = deque(maxlen=limits.METRICS_PER_SECOND)
        """When the latest texts were written."""

    def answer(self, accept: str) -> tuple[bytes, str]:
        """The metrics, and their content type, for a client with this `Accept` header.

        Who asks too often gets what was written last. Of the header only the format is heeded: what the client library
        makes of versions and escapings in it raises where they are not as expected.
        """
        kind = CONTENT_TYPE_OPENMETRICS if "application/openmetrics-text" in accept else CONTENT_TYPE_PLAIN_0_0_4
        now = time.monotonic()
        full = len(self._written) == limits.METRICS_PER_SECOND and now - self._written[0] < 1.0
        if kind not in self._last or not full:
            self._written.append(now)
            self._last[kind] = (openmetrics if kind == CONTENT_TYPE_OPENMETRICS else plain)(self._registry)
        return self._last[kind], kind
