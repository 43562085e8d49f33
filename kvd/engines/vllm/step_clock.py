"""Time as an engine sees it that hears of its daemon once a step."""

import time
from typing import Final

_LONGEST_STEP: Final = 1.0
"""Seconds."""


class StepClock:
    """The seconds that an engine has looked at its daemon, once a step: a longer step counts for `_LONGEST_STEP`.

    Else an engine that stood still, or computed for long, would take that for its daemon's absence.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._looked = time.monotonic()

    def look(self) -> None:
        """A step is planned, begins or ends."""
        looked = time.monotonic()
        self.now += min(looked - self._looked, _LONGEST_STEP)
        self._looked = looked
