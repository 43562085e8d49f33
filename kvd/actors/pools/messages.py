"""What the pools actor is told."""

from msgspec import Struct

from kvd.actors.runtime.messages import Pool
from kvd.layout import CacheSpec


class AttachPool(Struct, frozen=True, gc=False):
    """A worker wants its pool. `descriptor` is the one it kept from an earlier daemon, or -1; the pools close it.

    `quota` bounds the bytes of all pools of `uid` together, None where nothing does.
    """

    connection: int
    worker: str
    instance: bytes
    uid: int
    spec: CacheSpec
    raw_spec: bytes
    descriptor: int
    quota: int | None


class DetachPool(Struct, frozen=True, gc=False):
    """A worker gives its pool back."""

    connection: int
    worker: str


class WorkerGone(Struct, frozen=True, gc=False):
    """The session of a worker ended without a detach."""

    worker: str
    connection: int


class Quiesced(Struct, frozen=True, gc=False):
    """From leases and scheduler: nothing of theirs reads from or writes to the pool any more.

    `pool` is that of the `Quiesce` that this answers: it may come after the pool is gone, or has another epoch.
    """

    pool: Pool
    by: str


class RenewPool(Struct, frozen=True, gc=False):
    """To pools: who has the keys of this worker's pool is not all trusted any more; register it anew."""

    worker: str
