"""A pool of this daemon, from its making to its end."""

from dataclasses import dataclass, field
from enum import StrEnum

from kvd.actors.pools.messages import AttachPool, DetachPool
from kvd.actors.runtime.messages import Pool
from kvd.errors import BadRequest, ErrorCode, Unavailable
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
    """a successor, or its end, waits for its last lease and its last read"""
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
    """Who gets the pool next (`request` while it is made or renewed for its own worker), or waits for its end."""
    state: PoolState = PoolState.MAKING
    memory: Memory | None = None
    kept: bool = False
    """Whether its bytes are older than the attach of its worker."""
    overdue: bool = False
    """Whether it has been kept for as long as it may be."""
    users: set[str] = field(default_factory=set)
    """The actors that were told `Quiesce` and have not answered `Quiesced`."""

    @property
    def mapped(self) -> Memory:
        """The memory of a pool that has been made."""
        assert self.memory is not None  # noqa: S101 - it is asked for only then
        return self.memory

    @property
    def ends(self) -> bool:
        """Whether the memory, once quiesced, is given back: nobody wants it as it is."""
        if isinstance(self.waiting, AttachPool):
            return not self.suits(self.waiting)
        return self.waiting is not None or self.state is not PoolState.RENEWING

    def suits(self, request: AttachPool) -> bool:
        """Whether the memory is what an attach asks for."""
        return request.spec == self.pool.spec

    def check_free(self, request: AttachPool) -> None:
        """Checks that the pool may go to whoever sent `request`.

        Raises:
            BadRequest: `NOT_PERMITTED`, it belongs to another user.
            Unavailable: `POOL_BUSY`, another worker has it.

        """
        if request.uid != self.request.uid:
            text = f"the pool {self.pool.worker!r} belongs to user {self.request.uid}, not to {request.uid}"
            raise BadRequest(ErrorCode.NOT_PERMITTED, f"{text}; attach under another name")
        if self.state is not PoolState.KEPT:
            text = f"the pool {self.pool.worker!r} is {self.state}: another worker has it"
            raise Unavailable(ErrorCode.POOL_BUSY, f"{text}; detach that one, or attach under another name")

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
