"""A peer: another daemon, as the one that connects to it sees it.

The rules, which the table below makes precise:

- Nothing is asked of a peer before it has said who it is (`Welcome`) and the transport can reach its memory.
- Silence for three heartbeats (or a refused handshake), another incarnation, or the transport losing it, all mean the
  same: what was asked of it is lost, its agent is forgotten, and the handshake starts again by itself.
- A peer whose pools have changed is asked for them again, while reads from it go on.
"""

from enum import StrEnum

from kvd.state.machine import Step, Table


class State(StrEnum):
    """How far we are with it."""

    GREETING = "greeting"
    """`Hello` is sent, again and again"""
    LOADING = "loading"
    """the transport takes its metadata in"""
    READY = "ready"
    """it can be asked and read from"""
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
    """a pool is needed that it did not have when it said welcome"""
    SILENT = "silent"
    """three heartbeats without an answer"""
    RESTARTED = "restarted"
    """it answers under another incarnation"""
    CLOSE = "close"
    """nobody needs it any more"""


class Effect(StrEnum):
    """What to do."""

    GREET = "greet"
    LOAD = "load"
    ANNOUNCE = "announce"
    """tell who waits that it is ready"""
    LOSE = "lose"
    """tell who waits for an answer that none will come"""
    FORGET = "forget"
    """take its agent out of the transport"""
    HANG_UP = "hang_up"


_S, _E, _F = State, Event, Effect

TABLE: Table[State, Event, Effect] = Table(
    "peer",
    initial=_S.GREETING,
    final=frozenset({_S.CLOSED}),
    steps={
        (_S.GREETING, _E.WELCOME): Step(_S.LOADING, (_F.LOAD,)),
        # Not greeted at once, but by the next heartbeat: one that refuses us would be asked as fast as it answers.
        (_S.GREETING, _E.SILENT): Step(_S.GREETING, (_F.LOSE,)),
        (_S.GREETING, _E.RESTARTED): Step(_S.GREETING, (_F.GREET,)),
        (_S.GREETING, _E.CLOSE): Step(_S.CLOSED, (_F.HANG_UP,)),
        (_S.LOADING, _E.LOADED): Step(_S.READY, (_F.ANNOUNCE,)),
        (_S.LOADING, _E.UNREACHABLE): Step(_S.GREETING, (_F.LOSE,)),
        (_S.LOADING, _E.SILENT): Step(_S.GREETING, (_F.FORGET, _F.LOSE, _F.GREET)),
        (_S.LOADING, _E.RESTARTED): Step(_S.GREETING, (_F.FORGET, _F.LOSE, _F.GREET)),
        (_S.LOADING, _E.CLOSE): Step(_S.CLOSED, (_F.FORGET, _F.HANG_UP)),
        (_S.READY, _E.REFRESH): Step(_S.REFRESHING, (_F.GREET,)),
        (_S.READY, _E.UNREACHABLE): Step(_S.GREETING, (_F.LOSE, _F.GREET)),
        (_S.READY, _E.SILENT): Step(_S.GREETING, (_F.FORGET, _F.LOSE, _F.GREET)),
        (_S.READY, _E.RESTARTED): Step(_S.GREETING, (_F.FORGET, _F.LOSE, _F.GREET)),
        (_S.READY, _E.CLOSE): Step(_S.CLOSED, (_F.FORGET, _F.HANG_UP)),
        (_S.REFRESHING, _E.WELCOME): Step(_S.LOADING, (_F.LOAD,)),
        (_S.REFRESHING, _E.UNREACHABLE): Step(_S.GREETING, (_F.LOSE, _F.GREET)),
        (_S.REFRESHING, _E.SILENT): Step(_S.GREETING, (_F.FORGET, _F.LOSE, _F.GREET)),
        (_S.REFRESHING, _E.RESTARTED): Step(_S.GREETING, (_F.FORGET, _F.LOSE, _F.GREET)),
        (_S.REFRESHING, _E.CLOSE): Step(_S.CLOSED, (_F.FORGET, _F.HANG_UP)),
    },
    ignored={
        _S.GREETING: frozenset({_E.LOADED, _E.UNREACHABLE, _E.REFRESH}),
        _S.LOADING: frozenset({_E.WELCOME, _E.REFRESH}),
        _S.READY: frozenset({_E.WELCOME, _E.LOADED}),
        _S.REFRESHING: frozenset({_E.LOADED, _E.REFRESH}),
        _S.CLOSED: frozenset(_E),
    },
)
