"""What the completion actor is told."""

from msgspec import Struct

from kvd.protocol import worker as worker_protocol


class Notify(Struct, frozen=True, gc=False):
    """One notification for a worker."""

    worker: str
    item: worker_protocol.Notification


class SessionUp(Struct, frozen=True, gc=False):
    """A worker can be sent to. Another `tenancy` of its pool than before starts with an empty log."""

    worker: str
    tenancy: int


class SessionDown(Struct, frozen=True, gc=False):
    """A worker cannot be sent to."""

    worker: str


class Undelivered(Struct, frozen=True, gc=False):
    """The gateway could not send the last batch (the worker's queue is full): send again later."""

    worker: str


class Acknowledged(Struct, frozen=True, gc=False):
    """A worker has everything up to `sequence`."""

    worker: str
    sequence: int


class Forget(Struct, frozen=True, gc=False):
    """The worker detached: nothing needs to be kept for it."""

    worker: str
