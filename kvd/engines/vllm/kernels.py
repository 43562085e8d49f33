"""When the kernels of past steps have ended: until then they may write to what is offered, or read what is pulled."""

from __future__ import annotations

from collections.abc import Callable

from kvd.engines.kernels import Event


class Kernels:
    """The kernels of an engine whose cache is on a GPU, if `record` is given; those of a CPU end with their step."""

    def __init__(self, record: Callable[[], Event] | None = None) -> None:
        self._record = record
        self._last: Event | None = None

    def launched(self) -> None:
        """A step has given its kernels to the GPU."""
        if self._record is not None:
            self._last = self._record()

    @property
    def last(self) -> Event | None:
        """The end of the steps so far; None if they have ended."""
        if self._last is not None and self._last.query():
            self._last = None
        return self._last
