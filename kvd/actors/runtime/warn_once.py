"""Logs a culprit once: what can be done again for nothing must fill neither the log nor memory."""

from typing import Any, Final

MAX_CULPRITS: Final = 1024
"""That are remembered; those beyond them are not logged."""


class WarnOnce:
    """`log` is a structlog logger; `metric` counts what is not logged."""

    def __init__(self, log: Any, metric: str) -> None:
        self._log = log
        self._metric = metric
        self._seen: set[tuple[object, ...]] = set()

    def warn(self, event: str, *culprit: object, **fields: object) -> None:
        """A warning, where it is the first one for this event and culprit."""
        key = (event, *culprit)
        if key in self._seen or len(self._seen) >= MAX_CULPRITS:
            return
        self._seen.add(key)
        self._log.warning(event, **fields)
        if len(self._seen) == MAX_CULPRITS:
            self._log.warning("further ones are counted only", metric=self._metric)
