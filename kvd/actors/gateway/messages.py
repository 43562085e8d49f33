"""Messages to the gateway actor."""

from msgspec import Struct

from kvd.actors.runtime.messages import Pool
from kvd.errors import KvdError


class PoolLent(Struct, frozen=True, gc=False):
    """The worker on `connection` gets the pool; `descriptor` stays the pools actor's.

    `backing`, `device` and `length` are those of its `kvd.memory.interface.Memory`.
    `kept` says whether the bytes are older than this attach; `tenancy` changes when another worker gets the pool.
    """

    connection: int
    pool: Pool
    descriptor: int
    backing: str
    device: str
    length: int
    kept: bool
    tenancy: int


class PoolRenewed(Struct, frozen=True, gc=False):
    """The pool of an attached worker is registered anew: `pool` has another epoch."""

    pool: Pool


class PoolReturned(Struct, frozen=True, gc=False):
    """The detach on `connection` is complete."""

    connection: int


class ProcessReleased(Struct, frozen=True, gc=False):
    """No pool depends any more on the end of the process that opened `connection`."""

    connection: int


class AttachRefused(Struct, frozen=True):
    """The attach or detach on `connection` is refused, or its worker has lost its pool."""

    connection: int
    error: KvdError


class Backlog(Struct, frozen=True, gc=False):
    """Whether a worker has so many notifications unacknowledged that its new requests are refused."""

    worker: str
    full: bool


class Reported(Struct, frozen=True, gc=False):
    """An actor's section of a status."""

    token: int
    section: str
    content: object
