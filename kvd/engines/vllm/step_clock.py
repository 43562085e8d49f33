"""Time as an engine sees it that hears of its daemon once a step."""

import time


class StepClock:
    """The seconds that an engine has looked at its daemon, once a step: a longer step counts for `longest`.

    Else an engine that stood still, or computed for long, would take that for its daemon's absence.
    """

    def __init__(self, longest: float = 1.0) -> None:
        self.now = 0.0
        self._longest = longest
        self._looked = time.monotonic()

    def look(self) -> None:
        """A step is planned, begins or ends."""
        looked = time.monotonic()
        self.now += min(looked - self._looked, self._longest)
        self._looked = looked
