"""The content of an offer: which blocks it holds, and for how many tokens. Runs at the producer's daemon.

The rules, which the table below makes precise:

- It grows until it is closed: an offer that names all its blocks at once is opened and closed in one step.
- What it has, it keeps: an extension adds tokens and blocks behind those before it, and takes none away. All of them
  belong to the one lease, from the moment in which they were named until it ends.
- The proof over the whole is made when it is closed. No fence holds without that proof, so no reader that knows a part
  of the blocks, or that asks too early, is told that it has finished.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvd.actors.runtime.machine import Step, Table
from kvd.errors import ErrorCode, refusal
from kvd.layout import Full, Group
from kvd.protocol.types import Spans, go_on, joined
from kvd.protocol.worker import Extend


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
    REFUSE = "refuse"


_S, _E, _F = State, Event, Effect

TABLE: Table[State, Event, Effect] = Table(
    "content",
    initial=_S.GROWING,
    final=frozenset({_S.CLOSED}),
    steps={
        (_S.GROWING, _E.EXTEND): Step(_S.GROWING),
        (_S.GROWING, _E.CLOSE): Step(_S.CLOSED, (_F.PROVE,)),
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
    """The blocks of each extension, in order, the last of them those of the close; empty once the offer has ended."""
    proof: bytes = field(default=b"", repr=False)
    """Over the whole; empty until it is closed."""
    _stops: dict[int, int] = field(default_factory=dict)
    """The position behind the last block, by group."""

    @property
    def blocks(self) -> Spans:
        """All that it has."""
        return joined(self.parts)

    def since(self, seen: int) -> Spans:
        """The blocks of all parts but the first `seen`."""
        return joined(self.parts[seen:])

    def add(self, tokens: int, spans: Spans) -> None:
        """Takes one part more."""
        self.tokens = tokens
        self.parts.append(spans)
        for span in spans:
            go_on(self._stops, span)

    def check(self, more: Extend, groups: Sequence[Group]) -> None:
        """Checks that an extension goes on where the one before it ended.

        Raises:
            BadRequest: `WRONG_STATE`, it is closed; `BAD_MESSAGE`, its tokens go back; `BAD_BLOCKS`, its blocks do not
                begin behind those before them, do not hold its tokens, or may only come with the close.

        """
        event = Event.CLOSE if more.closes else Event.EXTEND
        if Effect.REFUSE in TABLE.step(self.state, event).effects:
            text = f"the offer {more.offer!r} is closed, with {self.tokens} tokens; make another one"
            raise refusal(ErrorCode.WRONG_STATE, text)
        if more.tokens < self.tokens:
            text = f"the offer {more.offer!r} is extended to token {more.tokens}, and has {self.tokens} already"
            raise refusal(ErrorCode.BAD_MESSAGE, text)
        stops = self._stops.copy()
        for span in more.spans:
            window = groups[span.group].window
            if not more.closes and not isinstance(window, Full):
                text = f"blocks of group {span.group} ({window}) may be rewritten during the prefill; name them at the"
                raise refusal(ErrorCode.BAD_BLOCKS, f"{text} close")
            go_on(stops, span)
        for number, group in enumerate(groups):
            held = stops.get(number, 0) * group.block_tokens
            if not more.closes and isinstance(group.window, Full) and held < more.tokens:
                text = f"{more.tokens} tokens are said to be complete, the blocks of group {number} hold {held}"
                raise refusal(ErrorCode.BAD_BLOCKS, text)
