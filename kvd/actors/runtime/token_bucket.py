"""A bound on how often somebody may do something: so many at once, so many a second after that."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class RateLimit:
    """`burst` at once, then `per_second`."""

    per_second: float
    burst: int


class TokenBucket:
    """How much of a `RateLimit` somebody has left."""

    def __init__(self, pace: RateLimit, now: float) -> None:
        self._pace = pace
        self._left = float(pace.burst)
        self._at = now

    def take(self, now: float) -> bool:
        """Whether it may be done now; counts it if so."""
        self._left = min(float(self._pace.burst), self._left + (now - self._at) * self._pace.per_second)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def is_full(self, now: float) -> bool:
        """Whether nothing of it has been used lately, so that it need not be remembered."""
        return self._left + (now - self._at) * self._pace.per_second >= self._pace.burst


class TokenBuckets(Generic[K]):
    """How much of a `RateLimit` each of many has left; who has all of it is not remembered."""

    def __init__(self, pace: RateLimit) -> None:
        self._pace = pace
        self._rates: dict[K, TokenBucket] = {}

    def take(self, who: K, now: float) -> bool:
        """Whether `who` may do it now; counts it if so."""
        self._rates = {each: rate for each, rate in self._rates.items() if not rate.is_full(now)}
        return self._rates.setdefault(who, TokenBucket(self._pace, now)).take(now)
