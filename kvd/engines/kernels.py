"""When kernels that an engine has given to a GPU have ended: until then they may read or write what is to move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in what the GPU was given to do: a `torch.cuda.Event`."""

    def record(self, *stream: Any) -> None:
        """Puts it behind everything that was given to the GPU on this stream until now, or by this thread."""

    def query(self) -> bool:
        """Whether everything before it has been done."""


def record(stream: Any = None) -> Event:
    """An event behind everything that was given to the GPU on `stream` until now, or by this thread."""
    event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(*(() if stream is None else (stream,)))
    return event


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
