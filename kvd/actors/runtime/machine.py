"""A state machine as a table: (state, event) -> (new state, effects).

A table answers every event that can come in a state: with a step, or by ignoring it if it may come late. Whoever runs
a machine carries the effects out, in their order.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

from kvd.errors import ErrorCode, refusal

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)
F = TypeVar("F", bound=StrEnum)


class Step(NamedTuple, Generic[S, F]):
    """The new state, and what to do."""

    state: S
    effects: tuple[F, ...] = ()


@dataclass(slots=True)
class Table(Generic[S, E, F]):
    """One kind of machine: `steps` are its transitions, `ignored` the events that change nothing in a state."""

    name: str
    initial: S
    final: frozenset[S]
    steps: Mapping[tuple[S, E], Step[S, F]]
    ignored: Mapping[S, frozenset[E]]

    def step(self, state: S, event: E) -> Step[S, F]:
        """What `event` does in `state`.

        Raises:
            InternalError: the event cannot come in this state, so there is a bug in what runs the machine.

        """
        step = self.steps.get((state, event))
        if step is not None:
            return step
        if event in self.ignored.get(state, frozenset()):
            return Step(state)
        raise refusal(ErrorCode.INTERNAL, f"a {self.name} that is {state} cannot take {event}")


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
