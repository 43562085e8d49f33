"""Messages to the completion actor."""

from msgspec import Struct

from kvd.protocol import worker as worker_protocol


class Notify(Struct, frozen=True, gc=False):
    """One notification for a worker."""

    worker: str
    item: worker_protocol.Notification


class SessionUp(Struct, frozen=True, gc=False):
    """A worker can be sent to. Its log starts empty if the pool had another `tenancy` before."""

    worker: str
    tenancy: int


class SessionDown(Struct, frozen=True, gc=False):
    """A worker cannot be sent to."""

    worker: str


class Acknowledged(Struct, frozen=True, gc=False):
    """A worker has everything up to `sequence`."""

    worker: str
    sequence: int


class Forget(Struct, frozen=True, gc=False):
    """The worker has detached or its pool has ended: nothing needs to be kept for it."""

    worker: str
