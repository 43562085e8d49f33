"""What the gateway actor is told."""

from msgspec import Struct

from kvd.actors.runtime.messages import Pool
from kvd.errors import KvdError
from kvd.protocol.types import Message


class PoolLent(Struct, frozen=True, gc=False):
    """The worker on `connection` gets the pool; `descriptor` stays the pool's own.

    `tenancy` is the same as long as no other worker had the pool.
    """

    connection: int
    pool: Pool
    descriptor: int
    backing: str
    kept: bool
    tenancy: int


class PoolReturned(Struct, frozen=True, gc=False):
    """The detach on `connection` is complete."""

    connection: int


class AttachRefused(Struct, frozen=True):
    """The attach or detach on `connection` is refused."""

    connection: int
    error: KvdError


class Answer(Struct, frozen=True, gc=False):
    """An answer to one request of a worker; dropped where its session is gone."""

    worker: str
    message: Message


class Refusal(Struct, frozen=True):
    """The request `call` of a worker is refused and nothing changed."""

    worker: str
    call: int
    error: KvdError


class Backlog(Struct, frozen=True, gc=False):
    """Whether a worker leaves so many notifications unacknowledged that it gets no new requests accepted."""

    worker: str
    full: bool


class Reported(Struct, frozen=True, gc=False):
    """What an actor has to say for a status."""

    token: int
    section: str
    content: object


class PoolRenewed(Struct, frozen=True, gc=False):
    """To the gateway: the pool of a worker, which has it on, is registered anew."""

    pool: Pool
