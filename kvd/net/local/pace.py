"""How fast connections are accepted where everybody may connect: strangers who come again and again cost little."""

import asyncio
import math
from collections.abc import Callable
from typing import Final

from kvd import limits

_REST_SECONDS: Final = 0.02
"""uvloop's timers count milliseconds: one that is due sooner fires at once, and again and again."""


class Pace:
    """A `kvd.net.interface.Intake`: as many as a fleet has at once, then `limits.MAX_ACCEPTS_PER_SECOND`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._free_at = -math.inf
        """When the last one would have been accepted at this pace."""

    def admits(self, again: Callable[[], None]) -> bool:
        """Whether one more may be accepted now; if not, `again` is called when it may."""
        step = 1.0 / limits.MAX_ACCEPTS_PER_SECOND
        now = self._loop.time()
        self._free_at = max(self._free_at, now - limits.MAX_ACCEPTS_AT_ONCE * step)
        if self._free_at > now - step:
            self._loop.call_at(now + _REST_SECONDS, again)
            return False
        self._free_at += step
        return True
