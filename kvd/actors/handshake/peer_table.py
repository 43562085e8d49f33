"""A peer: another daemon, as the one that connects to it sees it.

The rules, which the table below makes precise:

- No request goes to a peer before it has said who it is (`Welcome`) and the transport can reach its memory.
- Silence for three heartbeats, a refused handshake, another incarnation, or a loss by the transport all mean the same:
  the requests in flight are lost, its agent is forgotten, and the handshake starts again by itself.
- A peer whose pools have changed is asked for them again, while reads from it go on.
"""

from enum import StrEnum

from kvd.actors.runtime.machine import Step, Table


class State(StrEnum):
    """How far we are with it."""

    GREETING = "greeting"
    """`Hello` is sent, again and again"""
    LOADING = "loading"
    """the transport is given its metadata"""
    READY = "ready"
    """it can be sent requests and read from"""
    REFRESHING = "refreshing"
    """ready, and asked for its pools again"""
    CLOSED = "closed"
    """forgotten"""


class Event(StrEnum):
    """What happened."""

    WELCOME = "welcome"
    LOADED = "loaded"
    """the transport can reach it"""
    UNREACHABLE = "unreachable"
    """the transport cannot reach it (any more)"""
    REFRESH = "refresh"
    """a pull needs a pool that it did not have when it said welcome"""
    SILENT = "silent"
    """three heartbeats without an answer"""
    RESTARTED = "restarted"
    """it answers under another incarnation"""
    CLOSE = "close"
    """no pull needs it any more"""


class Effect(StrEnum):
    """What to do."""

    GREET = "greet"
    LOAD = "load"
    ANNOUNCE = "announce"
    """tell the scheduler that it is ready"""
    LOSE = "lose"
    """tell the scheduler that no answer of it will come"""
    FORGET = "forget"
    """remove its agent from the transport"""
    HANG_UP = "hang_up"


_S, _E, _F = State, Event, Effect

READY = (_S.READY, _S.REFRESHING)
"""It can be read from."""
LOADED = (_S.LOADING, *READY)
"""The transport has its metadata, or is about to."""

TABLE: Table[State, Event, Effect] = Table(
    "peer",
    initial=_S.GREETING,
    final=frozenset({_S.CLOSED}),
    steps={
        (_S.GREETING, _E.WELCOME): Step(_S.LOADING, (_F.LOAD,)),
        # In every state greeted by the next heartbeat, not at once: one that refuses us, even after its welcome, would
        # be greeted as fast as it answers.
        (_S.GREETING, _E.SILENT): Step(_S.GREETING, (_F.LOSE,)),
        (_S.GREETING, _E.RESTARTED): Step(_S.GREETING, (_F.GREET,)),
        (_S.GREETING, _E.CLOSE): Step(_S.CLOSED, (_F.HANG_UP,)),
        (_S.LOADING, _E.LOADED): Step(_S.READY, (_F.ANNOUNCE,)),
        (_S.LOADING, _E.UNREACHABLE): Step(_S.GREETING, (_F.LOSE,)),
        (_S.READY, _E.REFRESH): Step(_S.REFRESHING, (_F.GREET,)),
        (_S.REFRESHING, _E.WELCOME): Step(_S.LOADING, (_F.LOAD,)),
        **{(state, _E.UNREACHABLE): Step(_S.GREETING, (_F.LOSE, _F.GREET)) for state in READY},
        **{(state, _E.SILENT): Step(_S.GREETING, (_F.FORGET, _F.LOSE)) for state in LOADED},
        **{(state, _E.RESTARTED): Step(_S.GREETING, (_F.FORGET, _F.LOSE, _F.GREET)) for state in LOADED},
        **{(state, _E.CLOSE): Step(_S.CLOSED, (_F.FORGET, _F.HANG_UP)) for state in LOADED},
    },
    ignored={
        _S.GREETING: frozenset({_E.LOADED, _E.UNREACHABLE, _E.REFRESH}),
        _S.LOADING: frozenset({_E.WELCOME, _E.REFRESH}),
        _S.READY: frozenset({_E.WELCOME, _E.LOADED}),
        _S.REFRESHING: frozenset({_E.LOADED, _E.REFRESH}),
        _S.CLOSED: frozenset(_E),
    },
)
