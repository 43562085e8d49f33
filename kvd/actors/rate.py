"""A bound on how often somebody may do something: so many at once, so many a second after that."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """`burst` at once, then `per_second`."""

    per_second: float
    burst: int


class Rate:
    """How much of a `Pace` somebody has left."""

    def __init__(self, pace: Pace, now: float) -> None:
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
