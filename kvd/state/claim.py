"""A claim: a consumer's hold on a lease. Runs at the producer's daemon.

The rules, which the table below makes precise:

- A claim may come before its offer, and waits for it for a while. If its consumer cancels it meanwhile, it waits on, so
  that its reader counts as finished when the offer comes.
- A fence holds only if the claim is held at that moment. Then this reader has finished, and the claim is over.
- A claim is broken if its offer does not come in time, if it is not renewed, or if its lease ends under it. No fence of
  it holds from then on.
- What became of a claim that was fenced or broken is remembered for a while, so that a request that comes late or twice
  gets the same answer. A refused or released claim is forgotten at once.
"""

from enum import StrEnum

from kvd.state.machine import Step, Table


class State(StrEnum):
    """What the consumer may rely on."""

    WAITING = "waiting"
    """nothing yet: its offer may yet come"""
    LEAVING = "leaving"
    """nothing: its reader will not come, which counts once its offer does"""
    HELD = "held"
    """the lease lives at least as long as the claim is renewed"""
    FENCED = "fenced"
    """the lease was held until the fence"""
    BROKEN = "broken"
    """nothing any more"""
    GONE = "gone"
    """nothing: it was refused or released"""


class Event(StrEnum):
    """What happened."""

    GRANT = "grant"
    REFUSE = "refuse"
    FENCE = "fence"
    """the consumer has read everything, under the right generation"""
    BREAK = "break"
    """its offer did not come, its consumer went silent, or its lease ended"""
    RELEASE = "release"
    """the consumer does not want it any more"""
    CANCEL = "cancel"
    """the same before its offer came, and this reader will not come again"""


class Effect(StrEnum):
    """What to do."""

    REMEMBER = "remember"
    FORGET = "forget"
    TELL = "tell"
    """tell the consumer"""
    LEAVE = "leave"
    """take it out of its lease, which ends or goes on"""


_S, _E, _F = State, Event, Effect
_ENDED = (_S.FENCED, _S.BROKEN, _S.GONE)

TABLE: Table[State, Event, Effect] = Table(
    "claim",
    initial=_S.WAITING,
    final=frozenset(_ENDED),
    steps={
        (_S.WAITING, _E.GRANT): Step(_S.HELD),
        (_S.WAITING, _E.REFUSE): Step(_S.GONE, (_F.FORGET,)),
        (_S.WAITING, _E.BREAK): Step(_S.BROKEN, (_F.REMEMBER,)),
        (_S.WAITING, _E.RELEASE): Step(_S.GONE, (_F.FORGET,)),
        (_S.WAITING, _E.CANCEL): Step(_S.LEAVING),
        # It is held for a moment, and released as one that had been held all along.
        (_S.LEAVING, _E.GRANT): Step(_S.HELD),
        (_S.LEAVING, _E.REFUSE): Step(_S.GONE, (_F.FORGET,)),
        (_S.LEAVING, _E.BREAK): Step(_S.GONE, (_F.FORGET,)),
        (_S.HELD, _E.FENCE): Step(_S.FENCED, (_F.REMEMBER, _F.LEAVE)),
        (_S.HELD, _E.BREAK): Step(_S.BROKEN, (_F.REMEMBER, _F.TELL, _F.LEAVE)),
        (_S.HELD, _E.RELEASE): Step(_S.GONE, (_F.FORGET, _F.LEAVE)),
    },
    ignored=dict.fromkeys((_S.LEAVING, *_ENDED), frozenset({_E.RELEASE})),
)
