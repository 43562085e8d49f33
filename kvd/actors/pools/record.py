"""A pool of this daemon, from its making to its end."""

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from kvd.actors.pools.messages import AttachPool
from kvd.actors.runtime.messages import Pool
from kvd.errors import BadRequest, ErrorCode, KvdError, Unavailable
from kvd.memory.interface import Memory


class PoolState(StrEnum):
    """Where a pool is in its life."""

    MAKING = "making"
    """being allocated, faulted in, registered"""
    LENT = "lent"
    KEPT = "kept"
    """its worker is gone; waits for a successor"""
    QUIETING = "quieting"
    """a successor, its end, or another registration waits for the last lease and the last read"""
    ENDING = "ending"
    """being deregistered"""


@dataclass(slots=True)
class PoolRecord:
    """What is known of it."""

    pool: Pool
    state: PoolState
    request: AttachPool
    """The attach that the pool serves, or will serve."""
    tenancy: int
    """Another number for every worker that the pool was given to, from its attach until its successor's."""
    memory: Memory | None = None
    kept: bool = False
    users: set[str] = field(default_factory=set)
    """Who has not said `Quiesced` yet."""
    detaching: int | None = None
    """The connection that waits for `PoolReturned`."""
    successor: AttachPool | None = None
    """Who gets the pool, or its name, when it is quiet."""
    renewing: bool = False
    """It gets another registration before anything else."""
    lent: bool = False
    """A worker has it, whatever its state."""

    @property
    def ends(self) -> bool:
        """Whether nobody wants the memory as it is, once it is quiet."""
        if self.successor is not None:
            return not self.suits(self.successor)
        return self.detaching is not None or not self.renewing

    def suits(self, request: AttachPool) -> bool:
        """Whether the memory is what an attach asks for."""
        return request.spec == self.pool.spec

    def of_another(self, uid: int) -> KvdError:
        """Why `uid` may not have it."""
        text = f"the pool {self.pool.worker!r} belongs to user {self.request.uid}, not to {uid}"
        return BadRequest(ErrorCode.NOT_PERMITTED, f"{text}; attach under another name")

    def busy(self) -> KvdError:
        """Why another worker may not have it now."""
        text = f"the pool {self.pool.worker!r} is {self.state}: another worker has it"
        return Unavailable(ErrorCode.POOL_BUSY, f"{text}; detach that one, or attach under another name")

    def quarantined(self) -> KvdError:
        """Why nobody may have it now."""
        text = f"the pool {self.pool.worker!r} is in quarantine: a read into it has not ended"
        return Unavailable(ErrorCode.POOL_BUSY, f"{text}; try again later, or attach under another name")

    def report(self) -> dict[str, object]:
        """As a status tells of it."""
        return {
            "worker": self.pool.worker,
            "bytes": self.pool.size,
            "backing": self.memory.backing if self.memory else None,
            "state": self.state,
            "epoch": self.pool.epoch,
            "uid": self.request.uid,
        }

    def with_epoch(self, epoch: int) -> Pool:
        """The pool as it is called from another registration, or another worker, on."""
        return msgspec.structs.replace(self.pool, epoch=epoch)
