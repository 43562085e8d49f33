"""Logs each offender once, so repeated bad requests cannot flood the log."""

from typing import Any, Final

MAX_CULPRITS: Final = 1024
"""Offenders that are remembered; those beyond are not logged."""


class WarnOnce:
    """`log` is a structlog logger; `metric` names the counter of what is not logged."""

    def __init__(self, log: Any, metric: str) -> None:
        self._log = log
        self._metric = metric
        self._seen: set[tuple[object, ...]] = set()

    def warn(self, event: str, *offender: object, **fields: object) -> None:
        """Logs a warning, if it is the first for this event and offender."""
        key = (event, *offender)
        if key in self._seen or len(self._seen) >= MAX_CULPRITS:
            return
        self._seen.add(key)
        self._log.warning(event, **fields)
        if len(self._seen) == MAX_CULPRITS:
            self._log.warning("further ones are counted only", metric=self._metric)
