"""What takes long is done beside the loop."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from kvd.errors import KvdError

T = TypeVar("T")


class Background(Protocol):
    """Runs what takes long (faulting in gigabytes, reading a large spec) beside the loop."""

    def __call__(self, work: Callable[[], T], done: Callable[[T | KvdError], None]) -> None:
        """Calls `done` on the loop with what `work` returned or raised."""
