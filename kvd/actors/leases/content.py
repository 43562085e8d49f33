"""The content of an offer: which blocks it holds, and for how many tokens. Runs at the producer's daemon.

The rules, which the table below makes precise:

- It grows until it is closed: an offer that names all its blocks at once is opened and closed in one step.
- What it has, it keeps: an extension adds tokens and blocks behind those before it, and takes none away. All of them
  belong to the one lease, from the moment in which they were named until it ends.
- The proof over the whole is made when it is closed. No fence holds without that proof, so no reader that knows a part
  of the blocks, or that asks too early, is told that it has finished.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

from kvd import limits
from kvd.actors.runtime.machine import Step, Table
from kvd.actors.runtime.pools import check_complete
from kvd.errors import ErrorCode, refusal
from kvd.layout import Full, Group
from kvd.protocol.types import Span, Spans, go_on, joined
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


class Part(NamedTuple):
    """Blocks that were named together, at most `limits.MAX_PART_BLOCKS`: so many tokens are complete with them."""

    tokens: int
    spans: Spans


class Portion(NamedTuple):
    """What a reader is told at once: these blocks are new, and `parts` parts are then known, of `tokens` tokens."""

    parts: int
    tokens: int
    spans: Spans
    is_last: bool


@dataclass(slots=True, eq=False)
class Content:
    """What one offer holds so far; follows `TABLE`."""

    state: State = TABLE.initial
    tokens: int = 0
    """So many are complete, from the first of the sequence on."""
    parts: list[Part] = field(default_factory=list)
    """What each extension named, in order, the last of it with the close; empty once the offer has ended."""
    proof: bytes = field(default=b"", repr=False)
    """Over the whole; empty until it is closed."""
    spans: int = 0
    """How many its parts have, and how many of these are empty: about what they take in memory."""
    _stops: dict[int, int] = field(default_factory=dict)
    """The position behind the last block, by group."""

    @property
    def blocks(self) -> Spans:
        """All that it has."""
        return joined(part.spans for part in self.parts)

    def after(self, seen: int) -> Portion:
        """What comes after the first `seen` parts: one part, and as many more as a small message takes."""
        told: list[Spans] = []
        tokens, left = 0, limits.MAX_PART_BLOCKS
        for part in islice(self.parts, seen, None):
            left -= _spans(part.spans) * limits.BLOCKS_PER_SPAN + _blocks(part.spans)
            if told and left < 0:
                break
            told.append(part.spans)
            tokens = part.tokens
        parts = seen + len(told)
        last = self.state is State.CLOSED and parts == len(self.parts)
        return Portion(parts, tokens, joined(told), last)

    def blocks_after(self, seen: int) -> int:
        """How many blocks come after the first `seen` parts."""
        return sum(_blocks(part.spans) for part in self.parts[seen:])

    def add(self, tokens: int, spans: Spans) -> None:
        """Takes what is named together."""
        for span in spans:
            go_on(self._stops, span)
        *some, rest = _cut(spans)
        new = [*(Part(self.tokens, part) for part in some), Part(tokens, rest)]
        self.parts += new
        self.spans += sum(_spans(part.spans) for part in new)
        self.tokens = tokens

    def forget(self) -> None:
        """Its offer has ended: nobody asks for its blocks any more."""
        self.parts, self.spans = [], 0
        self._stops.clear()

    def check(self, more: Extend, spans: Spans, groups: Sequence[Group]) -> None:
        """Checks that an extension by `spans`, none of which is empty, goes on where the one before it ended.

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
        for span in spans:
            window = groups[span.group].window
            if not more.closes and not isinstance(window, Full):
                text = f"blocks of group {span.group} ({window}) may be rewritten during the prefill; name them at the"
                raise refusal(ErrorCode.BAD_BLOCKS, f"{text} close")
            go_on(stops, span)
        if not more.closes:
            check_complete(stops, more.tokens, groups)


def _blocks(spans: Spans) -> int:
    return sum(len(span.ids) for span in spans) // 4


def _spans(spans: Spans) -> int:
    """As many as these, at least one: an empty part is kept, too."""
    return max(1, len(spans))


def _cut(spans: Spans) -> Iterator[Spans]:
    """The same blocks, at most `limits.MAX_PART_BLOCKS` at a time; at least one part."""
    part: list[Span] = []
    left = limits.MAX_PART_BLOCKS
    for span in spans:
        first, ids = span.first, span.ids
        while len(ids) > 4 * left:
            part.append(Span(span.group, first, ids[: 4 * left]))
            first, ids = first + left, ids[4 * left :]
            yield tuple(part)
            part, left = [], limits.MAX_PART_BLOCKS
        part.append(Span(span.group, first, ids) if first != span.first else span)
        left -= len(ids) // 4
    yield tuple(part)
