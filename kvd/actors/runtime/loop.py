"""What actors use of an event loop, which asyncio's loops and the simulator's have, and of threads beside it."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from kvd.errors import KvdError

T = TypeVar("T")


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


class Background(Protocol):
    """Runs work that would block the loop for long (faulting in gigabytes, reading a large spec) in another thread."""

    def __call__(self, work: Callable[[], T], done: Callable[[T | KvdError], None]) -> None:
        """Calls `work` in a thread, then `done` on the loop with what it returned or raised."""
