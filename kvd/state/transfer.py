"""A transfer: what one producer rank contributes to one pull. Runs at the consumer's daemon.

The rules, which the table below makes precise:

- Nothing is read before the lease is known to exist: it is granted, or the ticket names it. A transfer is held only by
  a fence that was asked for after the last byte landed, or by the lease's stamp, read after it. All else ends in
  `ended`, and its request in failure.
- While a read is open at the transport the blocks are in quarantine, whatever became of the request: only `landed` and
  `broke`, the transport's own words, end that.
- The claim is let go only after the read is over, so that a producer never frees what is still being read.
"""

from enum import StrEnum

from kvd.state.machine import Step, Table


class State(StrEnum):
    """What the transfer waits for."""

    CONNECTING = "connecting"
    """the handshake with the producer's daemon"""
    CLAIMING = "claiming"
    """the producer's grant"""
    READING = "reading"
    """the last byte"""
    FENCING = "fencing"
    """the producer's word that the lease was held"""
    DRAINING = "draining"
    """the transport's word that nothing writes any more, after the request has ended"""
    SETTLING = "settling"
    """the producer's word that it knows of the read; all bytes are here and proven already"""
    HELD = "held"
    """nothing: all bytes are here and proven"""
    ENDED = "ended"
    """nothing: it contributed nothing"""


class Event(StrEnum):
    """What happened."""

    CONNECTED = "connected"
    KNOWN = "known"
    """connected, and the ticket names the lease: a grant would say nothing new"""
    LASTS = "lasts"
    """a read that was not claimed goes on for so long that its lease should be held"""
    GRANTED = "granted"
    REFUSED = "refused"
    """by the producer: claim refused, lease broken, or the peer is lost"""
    LANDED = "landed"
    STAMPED = "stamped"
    """landed, and the lease's stamp was found after the last byte"""
    BROKE = "broke"
    """the transport ended the read without all bytes"""
    PROVEN = "proven"
    """the fence came back: held"""
    STOP = "stop"
    """the request has ended otherwise: cancelled, past its deadline, or another transfer of it failed"""


class Effect(StrEnum):
    """What to do."""

    CLAIM = "claim"
    READ = "read"
    FENCE = "fence"
    SETTLE = "settle"
    """tell the producer, soon, that this reader has finished"""
    ABORT = "abort"
    """ask the transport to end the read early"""
    LET_GO = "let_go"
    """tell the producer that the claim is not wanted any more"""
    FAIL = "fail"
    """the request fails"""
    CONTRIBUTE = "contribute"
    """this transfer is done"""
    FREE = "free"
    """its blocks leave quarantine"""


_S, _E, _F = State, Event, Effect

TABLE: Table[State, Event, Effect] = Table(
    "transfer",
    initial=_S.CONNECTING,
    final=frozenset({_S.HELD, _S.ENDED}),
    steps={
        (_S.CONNECTING, _E.CONNECTED): Step(_S.CLAIMING, (_F.CLAIM,)),
        (_S.CONNECTING, _E.KNOWN): Step(_S.READING, (_F.READ,)),
        (_S.CONNECTING, _E.REFUSED): Step(_S.ENDED, (_F.FREE, _F.FAIL)),
        (_S.CONNECTING, _E.STOP): Step(_S.ENDED, (_F.FREE,)),
        (_S.CLAIMING, _E.GRANTED): Step(_S.READING, (_F.READ,)),
        (_S.CLAIMING, _E.REFUSED): Step(_S.ENDED, (_F.FREE, _F.FAIL)),
        (_S.CLAIMING, _E.STOP): Step(_S.ENDED, (_F.LET_GO, _F.FREE)),
        (_S.READING, _E.LANDED): Step(_S.FENCING, (_F.FENCE,)),
        (_S.READING, _E.LASTS): Step(_S.READING, (_F.CLAIM,)),
        (_S.READING, _E.STAMPED): Step(_S.SETTLING, (_F.FREE, _F.CONTRIBUTE, _F.SETTLE)),
        (_S.READING, _E.BROKE): Step(_S.ENDED, (_F.LET_GO, _F.FREE, _F.FAIL)),
        (_S.READING, _E.REFUSED): Step(_S.DRAINING, (_F.ABORT, _F.FAIL)),
        (_S.READING, _E.STOP): Step(_S.DRAINING, (_F.ABORT,)),
        (_S.FENCING, _E.PROVEN): Step(_S.HELD, (_F.FREE, _F.CONTRIBUTE)),
        (_S.FENCING, _E.REFUSED): Step(_S.ENDED, (_F.FREE, _F.FAIL)),
        (_S.FENCING, _E.STOP): Step(_S.ENDED, (_F.LET_GO, _F.FREE)),
        (_S.SETTLING, _E.PROVEN): Step(_S.HELD),
        # The lease may have ended meanwhile, which is not the reader's matter any more.
        (_S.SETTLING, _E.REFUSED): Step(_S.HELD),
        (_S.DRAINING, _E.STAMPED): Step(_S.ENDED, (_F.LET_GO, _F.FREE)),
        (_S.DRAINING, _E.LANDED): Step(_S.ENDED, (_F.LET_GO, _F.FREE)),
        (_S.DRAINING, _E.BROKE): Step(_S.ENDED, (_F.LET_GO, _F.FREE)),
    },
    ignored={
        # Answers may come twice, since asks are sent again when an answer is late.
        _S.READING: frozenset({_E.GRANTED}),
        _S.FENCING: frozenset({_E.GRANTED}),
        _S.SETTLING: frozenset({_E.GRANTED, _E.STOP}),
        _S.DRAINING: frozenset({_E.GRANTED, _E.REFUSED, _E.STOP}),
        _S.HELD: frozenset({_E.GRANTED, _E.REFUSED, _E.PROVEN, _E.STOP}),
        _S.ENDED: frozenset({_E.GRANTED, _E.REFUSED, _E.PROVEN, _E.STOP}),
    },
)
