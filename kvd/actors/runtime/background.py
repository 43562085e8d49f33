"""Work that would block the loop for long."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from kvd.errors import KvdError

T = TypeVar("T")


class Background(Protocol):
    """Runs such work (faulting in gigabytes, reading a large spec) in another thread."""

    def __call__(self, work: Callable[[], T], done: Callable[[T | KvdError], None]) -> None:
        """Calls `work` in a thread, then `done` on the loop with what it returned or raised."""
