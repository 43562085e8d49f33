"""A state machine as a table: (state, event) -> (new state, effects). Nothing else happens here.

A table must answer every event in every state: with a transition, or with `IGNORE` where the event may come late.
Whoever runs a machine carries the effects out, in their order.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from kvd.errors import ErrorCode, InternalError

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)
F = TypeVar("F", bound=StrEnum)


class Step(NamedTuple, Generic[S, F]):
    """Where an event leads, and what to do on the way."""

    state: S
    effects: tuple[F, ...] = ()


class Table(Generic[S, E, F]):
    """The transitions of one kind of machine.

    `steps` holds the transitions, `ignored` the events that change nothing in a state.
    """

    def __init__(
        self,
        name: str,
        *,
        initial: S,
        final: frozenset[S],
        steps: Mapping[tuple[S, E], Step[S, F]],
        ignored: Mapping[S, frozenset[E]],
    ) -> None:
        self.name = name
        self.initial = initial
        self.final = final
        self.steps = steps
        self.ignored = ignored

    def step(self, state: S, event: E) -> Step[S, F]:
        """The step that `event` means in `state`.

        Raises:
            InternalError: the table has no answer: whoever sent the event has lost count.

        """
        step = self.steps.get((state, event))
        if step is not None:
            return step
        if event in self.ignored.get(state, frozenset()):
            return Step(state)
        raise InternalError(ErrorCode.INTERNAL, f"a {self.name} that is {state} cannot take {event}")
