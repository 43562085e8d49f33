"""The supervisor: counts and logs calls of actors that raised, and stops the daemon if it must."""

from collections.abc import Callable

import structlog

from kvd import limits
from kvd.actors.runtime.actor import Actor, OnFailure
from kvd.actors.runtime.pace import RateLimit, TokenBucket
from kvd.errors import describe
from kvd.metrics import Metrics

_log = structlog.get_logger("kvd.actors")
_LINES = RateLimit(limits.FAILURES_LOGGED_PER_SECOND, 10)


class LoggingSupervisor:
    """Calls `stop(reason)` if the failed actor's `on_failure` says so."""

    def __init__(self, metrics: Metrics, stop: Callable[[str], None]) -> None:
        self._metrics = metrics
        self._stop = stop
        self._lines = TokenBucket(_LINES, 0.0)

    def failed(self, actor: Actor, method: str, error: Exception) -> None:
        """Logs the traceback and the method, not its arguments, which may be a user's; rate-limited."""
        self._metrics.actor_failures.labels(actor.name).inc()
        if self._lines.take(actor.loop.time()):
            _log.error("actor failed", actor=actor.name, method=method, policy=actor.on_failure.value, exc_info=error)
        if actor.on_failure is OnFailure.STOP:
            self._stop(f"the actor {actor.name} failed in {method}: {describe(error)}")
