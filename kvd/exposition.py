"""Metrics as text for Prometheus, for whoever asks, however often."""

import re
import time
from collections import deque
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kvd import limits
from kvd.errors import ErrorCode, refusal

_OPEN_METRICS: Final = re.compile(r"(application/openmetrics-text; version=)[^;]*")


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

        Who asks too often gets what was written last.

        Raises:
            BadRequest: `BAD_MESSAGE`, the header has a version that is no number.

        """
        try:
            # The kind has the client's own version, of which there is no end. All that it takes get the text of 1.0.0.
            _, kind = choose_encoder(accept)
            encode, kind = choose_encoder(_OPEN_METRICS.sub(r"\g<1>1.0.0", kind))
        except (TypeError, ValueError) as error:  # of its parser, which compares versions before it has checked them
            text = f"Accept is {accept[: limits.MAX_NAME_BYTES]!r}, in which a version is no number"
            raise refusal(ErrorCode.BAD_MESSAGE, text) from error
        now = time.monotonic()
        full = len(self._written) == limits.METRICS_PER_SECOND and now - self._written[0] < 1.0
        if kind not in self._last or not full:
            self._written.append(now)
            self._last[kind] = encode(self._registry)
        return self._last[kind], kind
