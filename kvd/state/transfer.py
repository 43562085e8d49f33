"""A transfer: what one producer rank contributes to one pull. Runs at the consumer's daemon.

The rules, which the table below makes precise:

- Nothing is read before the ticket is known to be right: the lease is granted, or its stamp was found before the first
  byte. A transfer is held only by a fence that was sent after the last byte landed, or by the stamp, read after it.
  Anything else ends in `ended`, and its pull in failure.
- Its read is open while it is `reading` or `draining`, whatever became of the pull: only the transport's own events
  (`landed`, `stamped`, `unproven`, `broke`; `left` may stand for each) end that.
- The claim of a pull that has not ended is released only after the read has ended. Of one that has ended it is released
  when the read has, or when that takes long: nobody will use what the read brings.
"""

from enum import StrEnum

from kvd.state.machine import Step, Table


class State(StrEnum):
    """What the transfer waits for."""

    NEW = "new"
    """its pull, which begins all its transfers together"""
    CLAIMING = "claiming"
    """the producer's grant"""
    KEEPING = "keeping"
    """its pull's end: it reads nothing, and its claim is renewed until then"""
    PLANNING = "planning"
    """the plan of its read, which takes longer than the grant took"""
    READING = "reading"
    """the last byte"""
    FENCING = "fencing"
    """the producer's answer that the lease was held"""
    DRAINING = "draining"
    """the end of its read, after the pull has ended"""
    SETTLING = "settling"
    """the producer's answer that it knows of the read; all bytes are here and proven already"""
    LEAVING = "leaving"
    """the producer's answer that it knows that no reader will come; it contributed nothing"""
    HELD = "held"
    """nothing: all bytes are here and proven"""
    ENDED = "ended"
    """nothing: it contributed nothing"""


class Event(StrEnum):
    """What happened."""

    BEGIN = "begin"
    """the lease must be claimed before it is read"""
    KNOWN = "known"
    """it begins, and the lease's stamp will show that the ticket is right: a grant would say nothing new"""
    LASTS = "lasts"
    """an unclaimed read goes on for so long that its lease should be claimed"""
    GRANTED = "granted"
    UNPLANNED = "unplanned"
    """granted, and its read is not planned yet"""
    PLANNED = "planned"
    KEPT = "kept"
    """granted, to a pull that only holds the lease"""
    REFUSED = "refused"
    """by the producer: it refused the claim or broke the lease; or the peer is lost"""
    LANDED = "landed"
    STAMPED = "stamped"
    """landed, and the lease's stamp was found after the last byte"""
    UNPROVEN = "unproven"
    """the stamp was not found before the first byte, and nothing was read"""
    BROKE = "broke"
    """the transport ended the read without all bytes"""
    LEFT = "left"
    """its pull was cancelled, no read is open (any more), and the producer has not granted a claim"""
    PROVEN = "proven"
    """the fence came back: held"""
    STOP = "stop"
    """the pull has ended: cancelled, past its deadline, or another transfer of it failed"""


class Effect(StrEnum):
    """What to do."""

    CLAIM = "claim"
    READ = "read"
    FENCE = "fence"
    SETTLE = "settle"
    """tell the producer, soon and until it has answered, that this reader has finished"""
    ABORT = "abort"
    """ask the transport to end the read early"""
    RELEASE = "release"
    """tell the producer that the claim is not wanted any more"""
    FAIL = "fail"
    """fail the pull"""
    CONTRIBUTE = "contribute"
    """its bytes are here and proven: the pull may be done"""


_S, _E, _F = State, Event, Effect

OPEN = frozenset({_S.READING, _S.DRAINING})
"""Its read is open: something may write to the pull's blocks."""
READ = frozenset({_S.FENCING, _S.SETTLING, _S.LEAVING, _S.HELD, _S.ENDED})
"""Its read has ended, or will not begin."""
TELLING = frozenset({_S.SETTLING, _S.LEAVING})
"""The producer is told that its reader has finished."""
PROVEN = frozenset({_S.SETTLING, _S.HELD})
"""All its bytes are here and proven."""

TABLE: Table[State, Event, Effect] = Table(
    "transfer",
    initial=_S.NEW,
    final=frozenset({_S.HELD, _S.ENDED}),
    steps={
        (_S.NEW, _E.BEGIN): Step(_S.CLAIMING, (_F.CLAIM,)),
        (_S.NEW, _E.KNOWN): Step(_S.READING, (_F.READ,)),
        (_S.NEW, _E.STOP): Step(_S.ENDED),
        (_S.NEW, _E.LEFT): Step(_S.LEAVING, (_F.SETTLE,)),
        (_S.CLAIMING, _E.GRANTED): Step(_S.READING, (_F.READ,)),
        (_S.CLAIMING, _E.UNPLANNED): Step(_S.PLANNING),
        (_S.CLAIMING, _E.KEPT): Step(_S.KEEPING),
        (_S.CLAIMING, _E.REFUSED): Step(_S.ENDED, (_F.FAIL,)),
        (_S.CLAIMING, _E.STOP): Step(_S.ENDED, (_F.RELEASE,)),
        (_S.CLAIMING, _E.LEFT): Step(_S.LEAVING, (_F.SETTLE,)),
        (_S.PLANNING, _E.PLANNED): Step(_S.READING, (_F.READ,)),
        (_S.PLANNING, _E.REFUSED): Step(_S.ENDED, (_F.FAIL,)),
        (_S.PLANNING, _E.STOP): Step(_S.ENDED, (_F.RELEASE,)),
        (_S.KEEPING, _E.REFUSED): Step(_S.ENDED, (_F.FAIL,)),
        (_S.KEEPING, _E.STOP): Step(_S.ENDED, (_F.RELEASE,)),
        (_S.READING, _E.LANDED): Step(_S.FENCING, (_F.FENCE,)),
        (_S.READING, _E.LASTS): Step(_S.READING, (_F.CLAIM,)),
        (_S.READING, _E.STAMPED): Step(_S.SETTLING, (_F.CONTRIBUTE, _F.SETTLE)),
        (_S.READING, _E.UNPROVEN): Step(_S.CLAIMING, (_F.CLAIM,)),
        (_S.READING, _E.BROKE): Step(_S.ENDED, (_F.RELEASE, _F.FAIL)),
        (_S.READING, _E.REFUSED): Step(_S.DRAINING, (_F.ABORT, _F.FAIL)),
        (_S.READING, _E.STOP): Step(_S.DRAINING, (_F.ABORT,)),
        (_S.FENCING, _E.PROVEN): Step(_S.HELD, (_F.CONTRIBUTE,)),
        (_S.FENCING, _E.REFUSED): Step(_S.ENDED, (_F.FAIL,)),
        (_S.FENCING, _E.STOP): Step(_S.ENDED, (_F.RELEASE,)),
        (_S.FENCING, _E.LEFT): Step(_S.LEAVING, (_F.SETTLE,)),
        (_S.SETTLING, _E.PROVEN): Step(_S.HELD),
        # The lease may have ended meanwhile, which does not concern the reader any more.
        (_S.SETTLING, _E.REFUSED): Step(_S.HELD),
        (_S.DRAINING, _E.STAMPED): Step(_S.ENDED, (_F.RELEASE,)),
        (_S.DRAINING, _E.LANDED): Step(_S.ENDED, (_F.RELEASE,)),
        (_S.DRAINING, _E.UNPROVEN): Step(_S.ENDED, (_F.RELEASE,)),
        (_S.DRAINING, _E.BROKE): Step(_S.ENDED, (_F.RELEASE,)),
        (_S.DRAINING, _E.LEFT): Step(_S.LEAVING, (_F.SETTLE,)),
        (_S.LEAVING, _E.PROVEN): Step(_S.ENDED),
        (_S.LEAVING, _E.REFUSED): Step(_S.ENDED),
    },
    ignored={
        # Answers may come twice, since requests are sent again if an answer is late.
        _S.KEEPING: frozenset({_E.GRANTED}),
        _S.PLANNING: frozenset({_E.GRANTED}),
        _S.READING: frozenset({_E.GRANTED}),
        _S.FENCING: frozenset({_E.GRANTED}),
        _S.SETTLING: frozenset({_E.GRANTED, _E.STOP}),
        _S.DRAINING: frozenset({_E.GRANTED, _E.REFUSED, _E.STOP}),
        _S.LEAVING: frozenset({_E.GRANTED, _E.STOP}),
        _S.HELD: frozenset({_E.GRANTED, _E.REFUSED, _E.PROVEN, _E.STOP}),
        _S.ENDED: frozenset({_E.GRANTED, _E.REFUSED, _E.PROVEN, _E.STOP}),
    },
)
