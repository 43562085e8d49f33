"""How often somebody may ask, and how often an offender is logged."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class RateLimit:
    """`burst` at once, then `per_second`."""

    per_second: float
    burst: int


class TokenBucket:
    """What is left of one `RateLimit`. `now` is in seconds on any monotonic clock."""

    def __init__(self, limit: RateLimit, now: float) -> None:
        self._limit = limit
        self._left = float(limit.burst)
        self._at = now

    def take(self, now: float) -> bool:
        """Takes a token; False if none is left."""
        if self.is_empty(now):
            return False
        self.charge(now, 1)
        return True

    def charge(self, now: float, count: int) -> None:
        """Takes `count` tokens, as a debt if so many are not left."""
        self._left = min(float(self._limit.burst), self._left + (now - self._at) * self._limit.per_second) - count
        self._at = now

    def is_empty(self, now: float) -> bool:
        """Whether no token is left."""
        return self._left + (now - self._at) * self._limit.per_second < 1.0

    def is_full(self, now: float) -> bool:
        """Whether it is as good as new, so that it need not be kept."""
        return self._left + (now - self._at) * self._limit.per_second >= self._limit.burst


class TokenBuckets(Generic[K]):
    """A bucket with the same limit for each key; full ones are not kept."""

    def __init__(self, limit: RateLimit) -> None:
        self._limit = limit
        self._rates: dict[K, TokenBucket] = {}

    def take(self, key: K, now: float) -> bool:
        """Takes a token of `key`; False if none is left."""
        return self._of(key, now).take(now)

    def charge(self, key: K, now: float, count: int) -> None:
        """Takes `count` tokens of `key`, as a debt if so many are not left."""
        self._of(key, now).charge(now, count)

    def is_empty(self, key: K, now: float) -> bool:
        """Whether `key` has no token left."""
        return key in self._rates and self._rates[key].is_empty(now)

    def _of(self, key: K, now: float) -> TokenBucket:
        self._rates = {each: rate for each, rate in self._rates.items() if not rate.is_full(now)}
        return self._rates.setdefault(key, TokenBucket(self._limit, now))


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
