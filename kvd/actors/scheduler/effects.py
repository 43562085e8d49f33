"""Carries out what the steps of pulls and transfers call for: in order, and never one effect within another."""

from collections import deque
from collections.abc import Callable
from typing import Any


class EffectQueue:
    """An effect may make further steps: their states change at once, their effects wait behind those in the queue."""

    def __init__(self, when_empty: Callable[[], None]) -> None:
        self._when_empty = when_empty
        self._queue: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._running = False

    def put(self, carry_out: Callable[..., object], *arguments: object) -> None:
        """Adds one effect, for the next `run`."""
        self._queue.append((carry_out, arguments))

    def run(self) -> None:
        """Carries out what waits. Called within an effect it does nothing: the queue is being run already."""
        if self._running:
            return
        self._running = True
        try:
            while self._queue:
                carry_out, arguments = self._queue.popleft()
                carry_out(*arguments)
        finally:
            self._running = False
        self._when_empty()
