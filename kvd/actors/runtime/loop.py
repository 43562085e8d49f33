"""The part of an event loop that actors use, which asyncio's loops and the simulator's virtual-time loop have."""

from collections.abc import Callable
from typing import Any, Protocol


class Timer(Protocol):
    """A callback that is due later."""

    def cancel(self) -> None:
        """Drops the callback."""


class Loop(Protocol):
    """A monotonic clock, and callbacks in the order in which they were asked for."""

    def time(self) -> float:
        """Seconds since an arbitrary moment."""

    def call_soon(self, callback: Callable[..., object], *args: Any) -> Any:
        """Calls back after the current callback, in order."""

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Timer:
        """Calls back `delay` seconds from now."""
