"""The supervisor: reports and counts what an actor could not handle, and stops the daemon where that may matter."""

from collections.abc import Callable

import structlog

from kvd.actors.actor import Actor, OnFailure
from kvd.metrics import Metrics

_log = structlog.get_logger("kvd.actors")


class LoggingSupervisor:
    """Acts by the failed actor's `on_failure`; `stop` ends the daemon."""

    def __init__(self, metrics: Metrics, stop: Callable[[str], None]) -> None:
        self._metrics = metrics
        self._stop = stop

    def failed(self, actor: Actor, message: object, error: Exception) -> None:
        """Logs the error with its traceback and the message's kind (its content may be a user's)."""
        self._metrics.actor_failures.labels(actor.name).inc()
        kind = type(message).__name__
        _log.error("actor failed", actor=actor.name, message=kind, policy=actor.on_failure.value, exc_info=error)
        if actor.on_failure is OnFailure.STOP:
            self._stop(f"the actor {actor.name} could not handle {kind}: {error!r}")
