"""Messages to the pools actor."""

from msgspec import Struct

from kvd.actors.runtime.messages import Pool
from kvd.layout import CacheSpec


class AttachPool(Struct, frozen=True, gc=False):
    """A worker wants its pool.

    `pid` is 0 if it is not visible to us; `watched` says whether a `WorkerEnded` will tell of the process's end.
    `descriptor` is the one that it kept from an earlier daemon, or -1; the pools actor closes it. `quota` bounds the
    bytes of all pools of `uid` together, None if unbounded.
    """

    connection: int
    worker: str
    instance: bytes
    pid: int
    watched: bool
    uid: int
    spec: CacheSpec
    raw_spec: bytes
    descriptor: int
    quota: int | None


class DetachPool(Struct, frozen=True, gc=False):
    """A worker gives its pool back and waits for `PoolReturned`."""

    connection: int
    worker: str


class WorkerGone(Struct, frozen=True, gc=False):
    """The session of a worker ended without a detach."""

    worker: str
    connection: int


class WorkerEnded(Struct, frozen=True, gc=False):
    """After `WorkerGone`: the process that opened the session has ended, too, and writes to no memory any more."""

    connection: int


class Quiesced(Struct, frozen=True, gc=False):
    """From leases and scheduler: nothing of theirs reads from or writes to the pool any more.

    `pool` is that of the `Quiesce` it answers; the pool may be gone by now, or have another epoch.
    """

    pool: Pool
    by: str


class LeasedPools(Struct, frozen=True, gc=False):
    """From leases, as asked: the ids of the pools of which offers stand."""

    pools: frozenset[int]


class EndPool(Struct, frozen=True, gc=False):
    """An operator wants a pool to end whose worker is gone, and waits for `PoolReturned`.

    `uid` is None for those who may end everybody's.
    """

    connection: int
    worker: str
    uid: int | None


class RenewPool(Struct, frozen=True, gc=False):
    """A peer that has the keys of this worker's pool has lost its rights: register the pool anew."""

    worker: str
