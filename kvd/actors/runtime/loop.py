"""The part of an event loop that actors use. asyncio's loops have it, and so has the simulator's virtual-time loop."""

from collections.abc import Callable
from typing import Any, Protocol


class Timer(Protocol):
    """Something that will happen unless it is cancelled."""

    def cancel(self) -> None:
        """Makes it not happen."""


class Loop(Protocol):
    """Time in seconds, and callbacks in the order they were asked for."""

    def time(self) -> float:
        """Now; monotonic, from any origin."""

    def call_soon(self, callback: Callable[..., object], *args: Any) -> Any:
        """Calls back after the current callback, in order."""

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Timer:
        """Calls back `delay` seconds from now."""
