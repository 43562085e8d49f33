"""When kernels that an engine has given to a GPU have ended: until then they may read or write what is to move."""

from __future__ import annotations

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
