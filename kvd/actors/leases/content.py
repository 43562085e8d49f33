"""The content of an offer: which blocks it holds, and for how many tokens. Runs at the producer's daemon.

The rules, which the table below makes precise:

- It grows until it is closed: an offer that names all its blocks at once is opened and closed in one step.
- What it has, it keeps: an extension adds tokens and blocks behind those before it, and takes none away. All of them
  belong to the one lease, from the moment in which they were named until it ends.
- The proof over the whole is made when it is closed. No fence holds without that proof, so no reader that knows a part
  of the blocks, or that asks too early, is told that it has finished.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from kvd.actors.runtime.machine import Step, Table
from kvd.protocol.spans import joined
from kvd.protocol.types import Spans


class State(StrEnum):
    """Whether more is to come."""

    GROWING = "growing"
    """more blocks may come"""
    CLOSED = "closed"
    """these are all, and the proof is over all of them"""


class Event(StrEnum):
    """What the worker says."""

    EXTEND = "extend"
    """these blocks are complete, too"""
    CLOSE = "close"
    """these are the last ones"""


class Effect(StrEnum):
    """What to do."""

    PROVE = "prove"
    """make the proof over the whole, and the stamp"""
    TELL = "tell"
    """tell the readers that wait for more"""
    REFUSE = "refuse"


_S, _E, _F = State, Event, Effect

TABLE: Table[State, Event, Effect] = Table(
    "content",
    initial=_S.GROWING,
    final=frozenset({_S.CLOSED}),
    steps={
        (_S.GROWING, _E.EXTEND): Step(_S.GROWING, (_F.TELL,)),
        (_S.GROWING, _E.CLOSE): Step(_S.CLOSED, (_F.PROVE, _F.TELL)),
        (_S.CLOSED, _E.EXTEND): Step(_S.CLOSED, (_F.REFUSE,)),
        (_S.CLOSED, _E.CLOSE): Step(_S.CLOSED, (_F.REFUSE,)),
    },
    ignored={},
)


@dataclass(slots=True, eq=False)
class Content:
    """What one offer holds so far; follows `TABLE`."""

    state: State = TABLE.initial
    tokens: int = 0
    """So many are complete, from the first of the sequence on."""
    parts: list[Spans] = field(default_factory=list)
    """The blocks of each extension, in order; the last are those of the close."""
    proof: bytes = field(default=b"", repr=False)
    """Over the whole; empty until it is closed."""

    @property
    def blocks(self) -> Spans:
        """All blocks that it ever had."""
        return joined(self.parts)

    def since(self, seen: int) -> Spans:
        """The blocks of all parts but the first `seen`."""
        return joined(self.parts[seen:])
