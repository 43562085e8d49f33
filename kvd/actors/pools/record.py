"""A pool of this daemon, from its making to its end."""

from dataclasses import dataclass, field
from enum import StrEnum

from kvd.actors.pools.requests import AttachPool, DetachPool
from kvd.actors.runtime.records import Pool
from kvd.errors import ErrorCode, refusal
from kvd.memory.interface import Memory


class PoolState(StrEnum):
    """Where a pool is in its life."""

    MAKING = "making"
    """being allocated, faulted in, registered"""
    LENT = "lent"
    """a worker has it"""
    KEPT = "kept"
    """its worker is gone; it waits for a successor"""
    QUIESCING = "quiescing"
    """a successor, or its end, waits for its last lease and its last read; if neither does any more it is kept then"""
    RENEWING = "renewing"
    """quiesces, too; then it is deregistered, mapped at another address and registered again"""
    ENDING = "ending"
    """being deregistered and given back"""


@dataclass(slots=True)
class PoolRecord:
    """What the pools actor knows of a pool."""

    pool: Pool
    request: AttachPool
    """The attach of the worker that has the pool, will have it, or had it last."""
    tenancy: int
    """Changes whenever the pool goes to another worker."""
    waiting: AttachPool | DetachPool | None
    """Who gets the pool next (`request` while it is made or renewed for its own worker), or waits for its end.

    Under another name: an attach that gets its room."""
    state: PoolState = PoolState.MAKING
    memory: Memory | None = None
    kept: bool = False
    """Whether its bytes are older than the attach of its worker."""
    overdue: bool = False
    """Whether it has been kept for as long as it may be."""
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
        """Whether the memory, once quiesced, is given back: its time is over, or whoever waits wants other memory."""
        return self.ending or (isinstance(self.waiting, AttachPool) and not self.suits(self.waiting))

    @property
    def forsaken(self) -> bool:
        """Whether it quiesces for a successor that is gone."""
        return self.state is PoolState.QUIESCING and self.waiting is None and not self.ending

    @property
    def is_spare(self) -> bool:
        """Whether it only waits for a successor: nobody has it or waits for it, and its process has ended for sure."""
        return self.state is PoolState.KEPT and self.waiting is None and not self.held

    def suits(self, request: AttachPool) -> bool:
        """Whether the memory is what an attach asks for."""
        return request.worker == self.pool.worker and request.spec == self.pool.spec

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
            text = f"the pool {self.pool.worker!r} belongs to user {self.request.uid}, not to {request.uid}"
            raise refusal(ErrorCode.NOT_PERMITTED, f"{text}; attach under another name")
        if self.state is not PoolState.KEPT and (not self.forsaken or self.is_held_beside(request)):
            text = f"the pool {self.pool.worker!r} is {self.state}: another worker has it"
            raise refusal(ErrorCode.POOL_BUSY, f"{text}; detach that one, or attach under another name")
        if self.waiting is not None and not self.is_own(request):
            text = f"the pool {self.pool.worker!r} is {self.state}: another worker waits for it"
            raise refusal(ErrorCode.POOL_BUSY, f"{text}; attach under another name")
        unseen = self.is_held_beside(request) and not self.request.watched
        if unseen and self.mapped.device:
            text = f"the pool {self.pool.worker!r} is in GPU memory; {self.holder} had it, and its end cannot be seen"
            hint = "use Linux 6.5 or later, or one PID namespace; else wait for `pool_linger`, or use another name"
            raise refusal(ErrorCode.POOL_BUSY, f"{text}: {hint}")

    def check_ended_by(self, uid: int | None) -> None:
        """Checks that user `uid` may end the pool now; None may end everybody's.

        Raises:
            BadRequest: `NOT_PERMITTED`, it belongs to another user.
            Unavailable: `POOL_BUSY`, a worker has it or is about to get it, or may still map it.

        """
        if uid not in (None, self.request.uid):
            text = f"the pool {self.pool.worker!r} belongs to user {self.request.uid}, not to {uid}"
            raise refusal(ErrorCode.NOT_PERMITTED, f"{text}; run this as that user, the daemon's or root")
        text = f"the pool {self.pool.worker!r} is {self.state}"
        if self.waiting is not None or not (self.state is PoolState.KEPT or self.forsaken):
            raise refusal(ErrorCode.POOL_BUSY, f"{text}: a worker has it or waits for it; stop that, or try again")
        if self.held and self.request.watched:
            raise refusal(ErrorCode.POOL_BUSY, f"{text}, but {self.holder}, which had it, lives: end that first")

    def report(self) -> dict[str, object]:
        """Its entry in a status."""
        return {
            "worker": self.pool.worker,
            "bytes": self.pool.size,
            "backing": self.memory.backing if self.memory else None,
            "device": self.memory.device if self.memory else "",
            "state": self.state,
            "epoch": self.pool.epoch,
            "uid": self.request.uid,
        }
