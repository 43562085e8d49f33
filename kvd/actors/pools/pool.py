"""A pool: memory of a worker that this daemon owns, from its making to its end.

The rules, which the table below makes precise:

- One worker has it at a time. Once that one is gone (its session is lost), the pool is kept for a successor, and leases
  and reads go on. The process that had it gets it back at once.
- Anybody else gets it only when that process has ended, so that it cannot write any more, and then only quiesced: with
  no lease and no open read, and with another epoch.
- It ends only quiesced, too, and its memory is given back when no peer can reach it any more. If whoever waits for
  that, or for the pool, goes away meanwhile, it still ends if it was to end, and is kept otherwise.
- A quiescing that takes too long breaks the leases. A read is never broken: whoever waits is refused, the pool waits
  on.
- One that nobody comes for ends after a while: counted from the end of its process, where that is told.
- When a peer loses its rights, the pool is quiesced by force, moved and registered anew; its worker keeps it.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from kvd.actors.pools.requests import AttachPool, DetachPool
from kvd.actors.runtime.machine import Step, Table
from kvd.actors.runtime.pools import Pool
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.memory.interface import Memory
from kvd.protocol.status import PoolStatus


class State(StrEnum):
    """Who has the pool, or what it waits for."""

    MAKING = "making"
    """being allocated, faulted in, registered"""
    LENT = "lent"
    """a worker has it"""
    KEPT = "kept"
    """its worker is gone; it waits for a successor"""
    AWAITED = "awaited"
    """kept, and a successor waits for the end of the process that had it"""
    QUIESCING = "quiescing"
    """a successor, another pool, or its end waits for its last lease and its last read"""
    FORSAKEN = "forsaken"
    """quiescing, though whoever waited for that is gone; it is kept then"""
    RENEWING = "renewing"
    """quiesces, too; then it is deregistered, mapped at another address and registered again"""
    ENDING = "ending"
    """being deregistered and given back"""
    GONE = "gone"
    """it has no memory (any more)"""


class Event(StrEnum):
    """What happened."""

    LEND = "lend"
    """it can go to whoever waits for it, or the process that had it is back"""
    RENEWED = "renewed"
    """it is registered anew, and its worker still has it"""
    UNWANTED = "unwanted"
    """it can be used, and nobody waits for it"""
    LEFT = "left"
    """its worker's session was lost"""
    DETACH = "detach"
    """its worker gives it back"""
    AWAIT = "await"
    """a successor wants it, and the process that had it lives"""
    CLEAR = "clear"
    """it is to be quiesced: for a successor, for the room of another pool, or for its end"""
    UNAWAITED = "unawaited"
    """whoever waited is gone or was refused, and it is not to end"""
    PROCESS_ENDED = "process_ended"
    """the process that had it has ended, and writes no more"""
    RENEW = "renew"
    """a peer that has its keys has lost its rights"""
    TIME = "time"
    """it was kept, or took to be quiesced, as long as it may"""
    QUIET = "quiet"
    """nothing uses it any more, and its memory is to be used again"""
    SPENT = "spent"
    """nothing uses it any more, and its memory is to be given back"""
    UNREGISTERED = "unregistered"
    """the transport cannot register it"""
    DEREGISTERED = "deregistered"
    """no peer can reach it any more"""
    FREED = "freed"
    """its memory is given back, or none could be had"""


class Effect(StrEnum):
    """What to do."""

    LEND = "lend"
    """give it to the worker"""
    TELL_RENEWED = "tell_renewed"
    """tell its worker the new epoch"""
    LINGER = "linger"
    """count the time that it is kept from now"""
    AWAIT = "await"
    """count the time that a successor waits for a process"""
    QUIESCE = "quiesce"
    """tell whoever uses it to end that"""
    BREAK = "break"
    """the same, by force: leases are broken"""
    HURRY = "hurry"
    """break leases; if only reads are left, refuse whoever waits"""
    REFUSE = "refuse"
    """refuse whoever waits for a process to end"""
    LOOK_AGAIN = "look_again"
    """end it in a moment, unless its worker's attach comes until then"""
    OPEN = "open"
    """let it be used again"""
    DEREGISTER = "deregister"
    MOVE = "move"
    """map it at another address and register it"""
    CLOSE = "close"
    """unmap it, but leave its memory to whoever has a descriptor"""
    FREE = "free"
    FORGET = "forget"
    """tell whoever waits, or serve them anew"""


_S, _E, _F = State, Event, Effect
UNUSED = frozenset({_S.KEPT, _S.FORSAKEN})
"""Nobody has it or waits for it."""
_REGISTERED = (_S.LENT, _S.KEPT, _S.AWAITED, _S.QUIESCING, _S.FORSAKEN)
"""A peer may have its keys, and they stay as they are."""
_SHOWN = {_S.AWAITED: _S.KEPT, _S.FORSAKEN: _S.QUIESCING}
"""What people are told of a state, where that is not its name."""

TABLE: Table[State, Event, Effect] = Table(
    "pool",
    initial=_S.MAKING,
    final=frozenset({_S.GONE}),
    steps={
        (_S.MAKING, _E.LEND): Step(_S.LENT, (_F.LEND,)),
        (_S.MAKING, _E.UNWANTED): Step(_S.KEPT, (_F.LINGER,)),
        (_S.MAKING, _E.CLEAR): Step(_S.QUIESCING, (_F.QUIESCE,)),
        (_S.MAKING, _E.UNREGISTERED): Step(_S.ENDING, (_F.CLOSE,)),
        (_S.MAKING, _E.FREED): Step(_S.GONE, (_F.FORGET,)),
        (_S.LENT, _E.LEFT): Step(_S.KEPT, (_F.LINGER,)),
        (_S.LENT, _E.DETACH): Step(_S.QUIESCING, (_F.QUIESCE,)),
        (_S.KEPT, _E.LEND): Step(_S.LENT, (_F.LEND,)),
        (_S.KEPT, _E.AWAIT): Step(_S.AWAITED, (_F.AWAIT,)),
        (_S.KEPT, _E.CLEAR): Step(_S.QUIESCING, (_F.QUIESCE,)),
        (_S.KEPT, _E.PROCESS_ENDED): Step(_S.KEPT, (_F.LINGER,)),
        (_S.KEPT, _E.TIME): Step(_S.KEPT, (_F.LOOK_AGAIN,)),
        (_S.AWAITED, _E.UNAWAITED): Step(_S.KEPT, (_F.LINGER,)),
        (_S.AWAITED, _E.PROCESS_ENDED): Step(_S.QUIESCING, (_F.QUIESCE,)),
        (_S.AWAITED, _E.TIME): Step(_S.AWAITED, (_F.REFUSE,)),
        (_S.QUIESCING, _E.LEND): Step(_S.LENT, (_F.LEND,)),
        (_S.QUIESCING, _E.UNAWAITED): Step(_S.FORSAKEN, (_F.LINGER,)),
        (_S.QUIESCING, _E.TIME): Step(_S.QUIESCING, (_F.HURRY,)),
        (_S.QUIESCING, _E.QUIET): Step(_S.QUIESCING, (_F.OPEN,)),
        (_S.QUIESCING, _E.SPENT): Step(_S.ENDING, (_F.DEREGISTER,)),
        (_S.FORSAKEN, _E.UNWANTED): Step(_S.KEPT, (_F.LINGER,)),
        (_S.FORSAKEN, _E.CLEAR): Step(_S.QUIESCING, (_F.QUIESCE,)),
        (_S.FORSAKEN, _E.PROCESS_ENDED): Step(_S.FORSAKEN, (_F.LINGER,)),
        (_S.FORSAKEN, _E.TIME): Step(_S.FORSAKEN, (_F.LOOK_AGAIN,)),
        (_S.FORSAKEN, _E.QUIET): Step(_S.FORSAKEN, (_F.OPEN,)),
        **{(state, _E.RENEW): Step(_S.RENEWING, (_F.BREAK,)) for state in _REGISTERED},
        (_S.RENEWING, _E.LEND): Step(_S.LENT, (_F.LEND,)),
        (_S.RENEWING, _E.RENEWED): Step(_S.LENT, (_F.TELL_RENEWED,)),
        (_S.RENEWING, _E.UNWANTED): Step(_S.KEPT, (_F.LINGER,)),
        (_S.RENEWING, _E.AWAIT): Step(_S.AWAITED, (_F.AWAIT,)),
        (_S.RENEWING, _E.CLEAR): Step(_S.QUIESCING, (_F.QUIESCE,)),
        (_S.RENEWING, _E.TIME): Step(_S.RENEWING, (_F.HURRY,)),
        (_S.RENEWING, _E.QUIET): Step(_S.RENEWING, (_F.DEREGISTER,)),
        (_S.RENEWING, _E.DEREGISTERED): Step(_S.RENEWING, (_F.MOVE,)),
        (_S.RENEWING, _E.SPENT): Step(_S.ENDING, (_F.DEREGISTER,)),
        (_S.RENEWING, _E.UNREGISTERED): Step(_S.ENDING, (_F.CLOSE,)),
        (_S.ENDING, _E.DEREGISTERED): Step(_S.ENDING, (_F.FREE,)),
        (_S.ENDING, _E.FREED): Step(_S.GONE, (_F.FORGET,)),
    },
    ignored={
        # What it is when it is registered decides; keys that nobody has yet, or new ones, need no others.
        _S.RENEWING: frozenset({_E.LEFT, _E.DETACH, _E.UNAWAITED, _E.PROCESS_ENDED, _E.RENEW}),
        # A deadline may pass in the turn in which it is unset.
        **dict.fromkeys(
            (_S.MAKING, _S.ENDING),
            frozenset({_E.LEFT, _E.DETACH, _E.UNAWAITED, _E.PROCESS_ENDED, _E.RENEW, _E.TIME}),
        ),
        _S.LENT: frozenset({_E.PROCESS_ENDED, _E.TIME}),
        _S.KEPT: frozenset({_E.LEFT}),
        _S.AWAITED: frozenset({_E.LEFT}),
        _S.QUIESCING: frozenset({_E.LEFT, _E.DETACH, _E.PROCESS_ENDED}),
        _S.FORSAKEN: frozenset({_E.LEFT}),
        _S.GONE: frozenset({_E.UNAWAITED}),
    },
)


@dataclass(slots=True)
class PoolRecord:
    """What the pools actor knows of a pool; follows `TABLE`."""

    pool: Pool
    request: AttachPool
    """The attach of the worker that has the pool, will have it, or had it last."""
    tenancy: int
    """Changes whenever the pool goes to another worker."""
    waiting: AttachPool | DetachPool | None
    """Who gets the pool next (`request` while it is made or renewed for its own worker), or waits for its end.

    Under another name: an attach that gets its room."""
    state: State = TABLE.initial
    memory: Memory | None = None
    preserved: bool = False
    """Whether its bytes are older than the attach of its worker."""
    error: KvdError | None = None
    """Why it could not be made or registered."""
    ending: bool = False
    """Whether it ends once it is quiesced, though nobody waits for that (any more)."""
    held: bool = False
    """Whether the process that has the pool, or had it last, may have it mapped: it got it and has not ended."""
    kept_since: float = 0.0
    """Since when nobody has had it or waited for it, on the loop's clock."""
    users: set[str] = field(default_factory=set)
    """The `User`s that were told to `quiesce` and have not said that they have."""

    @property
    def mapped(self) -> Memory:
        """The memory of a pool that has been made."""
        assert self.memory is not None  # noqa: S101 - it is asked for only then
        return self.memory

    @property
    def ends(self) -> bool:
        """Whether the memory, once quiesced, is given back: its time is over, or whoever waits wants other memory.

        Not beside a process that may have it mapped: one that is renewed meanwhile goes on waiting for that.
        """
        if self.ending or not isinstance(self.waiting, AttachPool):
            return self.ending
        return not self.suits(self.waiting) and not self.is_held_beside(self.waiting)

    @property
    def outlived(self) -> bool:
        """Whether the process that had it last lives, and its end will be told: the pool is kept until then."""
        return self.held and self.request.watched

    @property
    def shown(self) -> State:
        """Its state, for people."""
        return _SHOWN.get(self.state, self.state)

    @property
    def is_spare(self) -> bool:
        """Whether it only waits for a successor: nobody has it or waits for it, and its process has ended for sure."""
        return self.state is State.KEPT and not self.held

    def suits(self, request: AttachPool) -> bool:
        """Whether the memory is what an attach asks for."""
        return request.worker == self.pool.name and request.spec == self.pool.spec

    def is_held_beside(self, request: AttachPool) -> bool:
        """Whether another process than that of `request` may still map the memory, and would lose it or write to it.

        One whose end is not told loses it to a successor that wants other memory.
        """
        same = request.pid > 0 and request.pid == self.request.pid
        matters = self.request.watched or self.suits(request)
        return self.held and not same and not self.is_own(request) and matters

    def is_own(self, request: AttachPool) -> bool:
        """Whether the process that had the pool last asks for it again."""
        return request.instance == self.request.instance and self.suits(request)

    @property
    def holder(self) -> str:
        """The process that had the pool last, for people."""
        return f"process {self.request.pid}" if self.request.pid > 0 else "a process of another PID namespace"

    def check_free(self, request: AttachPool) -> None:
        """Checks that the pool may go to whoever sent `request`.

        Raises:
            BadRequest: `NOT_PERMITTED`, it belongs to another user.
            Unavailable: `POOL_BUSY`, another worker has it or waits for it, or may have it without our knowing.

        """
        if request.uid != self.request.uid:
            text = f"the pool {self.pool.name!r} belongs to user {self.request.uid}, not to {request.uid}"
            raise refusal(ErrorCode.NOT_PERMITTED, f"{text}; attach under another name")
        forsaken = self.state is State.FORSAKEN and not self.is_held_beside(request)
        if not (forsaken or self.state in (State.KEPT, State.AWAITED)):
            text = f"the pool {self.pool.name!r} is {self.shown}: another worker has it"
            raise refusal(ErrorCode.POOL_BUSY, f"{text}; detach that one, or attach under another name")
        if self.state is State.AWAITED and not self.is_own(request):
            text = f"the pool {self.pool.name!r} is {self.shown}: another worker waits for it"
            raise refusal(ErrorCode.POOL_BUSY, f"{text}; attach under another name")
        unseen = self.is_held_beside(request) and not self.request.watched
        if unseen and self.mapped.device:
            text = f"the pool {self.pool.name!r} is in GPU memory; {self.holder} had it, and its end cannot be seen"
            hint = "use Linux 6.5 or later, or one PID namespace; else wait for `pool_linger`, or use another name"
            raise refusal(ErrorCode.POOL_BUSY, f"{text}: {hint}")

    def check_ended_by(self, uid: int | None) -> None:
        """Checks that user `uid` may end the pool now; None may end everybody's.

        Raises:
            BadRequest: `NOT_PERMITTED`, it belongs to another user.
            Unavailable: `POOL_BUSY`, a worker has it or is about to get it, or may still map it.

        """
        if uid not in (None, self.request.uid):
            text = f"the pool {self.pool.name!r} belongs to user {self.request.uid}, not to {uid}"
            raise refusal(ErrorCode.NOT_PERMITTED, f"{text}; run this as that user, the daemon's or root")
        text = f"the pool {self.pool.name!r} is {self.shown}"
        if self.state not in UNUSED:
            raise refusal(ErrorCode.POOL_BUSY, f"{text}: a worker has it or waits for it; stop that, or try again")
        if self.outlived:
            raise refusal(ErrorCode.POOL_BUSY, f"{text}, but {self.holder}, which had it, lives: end that first")

    def refusal(self, why: str) -> KvdError:
        """What whoever waits is told that waits no more: `POOL_BUSY`."""
        pool = f"the pool {self.pool.name!r}"
        if not isinstance(self.waiting, AttachPool):
            return refusal(ErrorCode.POOL_BUSY, f"{pool} ends later: {why}")
        guest = "" if self.waiting.worker == self.pool.name else ", which was to make room,"
        text = f"{pool}{guest} cannot be had: {why}; try again later, or attach under another name"
        return refusal(ErrorCode.POOL_BUSY, text)

    def report(self) -> PoolStatus:
        """Its entry in a status."""
        return PoolStatus(
            worker=self.pool.name,
            bytes=self.pool.size,
            backing=self.memory.backing if self.memory else None,
            state=self.shown,
            uid=self.request.uid,
            device=self.memory.device if self.memory else "",
            epoch=self.pool.epoch,
        )
