"""A pull: blocks that a worker wants filled, from its request to the one outcome that it is told.

Runs at the consumer's daemon. The rules, which the table below makes precise:

- The worker is told exactly one outcome. It is `done` only if every transfer of the pull has brought its bytes and they
  are proven; the first transfer that fails, the deadline, or the worker itself ends it otherwise.
- Its blocks are given back once, and only while no read of it is open. If it fails or is cancelled before that, they
  are in quarantine until the transport has ended its reads; then the worker is told that they are free.
- One that is cancelled before it has transfers goes on for a while without its blocks, until its producers can be told
  that its reader will not come: their offers would stand until their time is over.
- Nothing is claimed before every producer's daemon has named its pool, and each producer rank gets one transfer.
"""

from enum import StrEnum

from msgspec import Struct, field

from kvd.actors.runtime.machine import Step, Table
from kvd.actors.runtime.pools import PeerView, Pool, Size
from kvd.actors.runtime.spans import PullSpan
from kvd.actors.scheduler.transfer import Transfer
from kvd.errors import KvdError
from kvd.protocol.ticket import Ticket
from kvd.protocol.types import Spans


class State(StrEnum):
    """What the pull waits for."""

    CONNECTING = "connecting"
    """word from its producers' daemons: that they are ready, and which pools they have; then its route, if that takes
    long to work out"""
    WAITING = "waiting"
    """a producer's worker that has not come back to its daemon, which is asked about its pools again after a while"""
    ROUTED = "routed"
    """its transfers, none of which has an open read"""
    READING = "reading"
    """its transfers, at least one of which has an open read"""
    FAILING = "failing"
    """the end of its open reads; it has failed"""
    CANCELLING = "cancelling"
    """the end of its open reads; it was cancelled"""
    LEAVING = "leaving"
    """word from its producers' daemons, to tell them that it was cancelled; it has no blocks any more"""
    DONE = "done"
    """nothing: all bytes are here and proven"""
    FAILED = "failed"
    """nothing: it has failed, and nothing writes to its blocks"""
    CANCELLED = "cancelled"
    """nothing: it was cancelled, and nothing writes to its blocks"""


class Event(StrEnum):
    """What happened."""

    MISSING = "missing"
    """a producer's daemon is not ready, or has not named the pool"""
    ABSENT = "absent"
    """a producer's daemon was asked several times for a pool whose worker may still come back"""
    RESTARTED = "restarted"
    """a producer's daemon has restarted, and says by itself when it is ready"""
    ROUTED = "routed"
    """all pools are known, and there is a transfer for each producer rank that matters"""
    OPENED = "opened"
    """a read of it is open"""
    CLOSED = "closed"
    """its last open read has ended"""
    PROVEN = "proven"
    """every transfer has brought its bytes, and they are proven"""
    FAIL = "fail"
    """a transfer failed, a producer is lost or does not fit, the deadline is over, or the daemon stops"""
    CANCEL = "cancel"
    """the worker does not want it any more"""


class Effect(StrEnum):
    """What to do."""

    CONNECT = "connect"
    """have the daemons asked that it waits for"""
    RETRY = "retry"
    """look again for the pools after a while"""
    BEGIN = "begin"
    """begin its transfers"""
    CONCLUDE = "conclude"
    """tell the worker the outcome"""
    STOP = "stop"
    """end its transfers"""
    FREE = "free"
    """give its blocks back, so that other pulls may name them"""
    LEAVE = "leave"
    """keep it without its blocks"""
    LEFT = "left"
    """forget it, and tell the producers that were found that its reader will not come"""
    TELL_FREED = "tell_freed"
    """tell the worker that its blocks have left quarantine"""


_S, _E, _F = State, Event, Effect

UNROUTED = frozenset({_S.CONNECTING, _S.WAITING, _S.LEAVING})
"""It has no transfers yet."""
QUARANTINED = frozenset({_S.FAILING, _S.CANCELLING})
"""It has ended, and its blocks may still be written to."""
WAS_CANCELLED = frozenset({_S.CANCELLING, _S.CANCELLED, _S.LEAVING})
_CONNECTING = (_S.CONNECTING, _S.WAITING)

TABLE: Table[State, Event, Effect] = Table(
    "pull",
    initial=_S.CONNECTING,
    final=frozenset({_S.DONE, _S.FAILED, _S.CANCELLED}),
    steps={
        **{(state, _E.MISSING): Step(_S.CONNECTING, (_F.CONNECT,)) for state in _CONNECTING},
        **{(state, _E.RESTARTED): Step(_S.CONNECTING) for state in _CONNECTING},
        (_S.CONNECTING, _E.ABSENT): Step(_S.WAITING, (_F.RETRY,)),
        **{(state, _E.ROUTED): Step(_S.ROUTED, (_F.BEGIN,)) for state in _CONNECTING},
        **{(state, _E.FAIL): Step(_S.FAILED, (_F.CONCLUDE, _F.FREE)) for state in _CONNECTING},
        **{(state, _E.CANCEL): Step(_S.LEAVING, (_F.CONCLUDE, _F.FREE, _F.LEAVE)) for state in _CONNECTING},
        (_S.LEAVING, _E.MISSING): Step(_S.LEAVING, (_F.CONNECT,)),
        (_S.LEAVING, _E.RESTARTED): Step(_S.LEAVING),
        (_S.LEAVING, _E.ABSENT): Step(_S.LEAVING, (_F.RETRY,)),
        (_S.LEAVING, _E.ROUTED): Step(_S.CANCELLED, (_F.LEFT,)),
        (_S.LEAVING, _E.FAIL): Step(_S.CANCELLED, (_F.LEFT,)),
        (_S.ROUTED, _E.OPENED): Step(_S.READING),
        (_S.ROUTED, _E.PROVEN): Step(_S.DONE, (_F.CONCLUDE, _F.FREE)),
        (_S.ROUTED, _E.FAIL): Step(_S.FAILED, (_F.CONCLUDE, _F.STOP, _F.FREE)),
        (_S.ROUTED, _E.CANCEL): Step(_S.CANCELLED, (_F.CONCLUDE, _F.STOP, _F.FREE)),
        (_S.READING, _E.CLOSED): Step(_S.ROUTED),
        (_S.READING, _E.FAIL): Step(_S.FAILING, (_F.CONCLUDE, _F.STOP)),
        (_S.READING, _E.CANCEL): Step(_S.CANCELLING, (_F.CONCLUDE, _F.STOP)),
        (_S.FAILING, _E.CLOSED): Step(_S.FAILED, (_F.TELL_FREED, _F.FREE)),
        (_S.CANCELLING, _E.CLOSED): Step(_S.CANCELLED, (_F.TELL_FREED, _F.FREE)),
    },
    ignored={
        _S.READING: frozenset({_E.OPENED}),
        # Whatever else happens to a pull in quarantine, it has its outcome.
        **dict.fromkeys(QUARANTINED, frozenset({_E.FAIL, _E.CANCEL})),
        # Several of its transfers may fail before they are stopped.
        _S.FAILED: frozenset({_E.FAIL}),
    },
)


PullKey = tuple[str, str]
"""(worker, request)."""


class Pull(Struct, eq=False):
    """What a worker asked for; follows `TABLE`."""

    key: PullKey
    pool: Pool
    ticket: Ticket
    blocks: Spans
    """Those of `pool` that are to be filled."""
    ticket_bytes: int
    """In memory, about: what it has as text, and its spans as they are decoded."""
    consumer: str
    """What producers know it as, together with the pulls of the engine's other ranks."""
    started: float
    addresses: frozenset[str]
    """Of its producers' daemons."""
    awaited: set[str]
    """Addresses of the daemons that it waits for while it is connecting."""
    unasked: set[str]
    """Addresses of the daemons that were ready when it came, and have not been asked for their pools since."""
    hold: bool
    """It only holds its leases."""
    size: Size
    """Of the blocks that are to be filled."""
    state: State = TABLE.initial
    lookups_left: int = 3
    """How often daemons are still asked again because of pools that they have not named: more than once, as an answer
    may have been on its way. After that, a pull whose ticket was made while the producer's daemon was away waits for
    the worker to come back there: it looks again every `retry` seconds, until its deadline."""
    transfers: list[Transfer] = field(default_factory=list)
    views: dict[str, PeerView] = field(default_factory=dict)
    """Its producers' daemons by address, as they were when it was routed: one that has done its part may go."""
    routing: int = 0
    """Number of the route that is being worked out for it (`kvd.actors.scheduler.producers`)."""
    failing: KvdError | None = None
    """Why it fails when its turn has come: until then nothing else is done for it."""
    span: PullSpan | None = None

    @property
    def can_go_on(self) -> bool:
        """Whether it waits for no daemon, and is not to fail."""
        return not self.awaited and self.failing is None
