"""What the pools actor is asked for, and whom it tells what becomes of that."""

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from kvd.actors.runtime.actor import Actor
from kvd.actors.runtime.pools import Pool
from kvd.errors import KvdError
from kvd.layout import CacheSpec
from kvd.memory.interface import Memory


class AttachPool(Struct, frozen=True, gc=False):
    """A worker wants its pool.

    `pid` is 0 if it is not visible to us; `watched` says whether its process's end will be told. `descriptor` is the
    one that it kept from an earlier daemon, or -1; the pools actor closes it. `quota` bounds the bytes of all pools of
    `uid` together, None if unbounded.
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
    """A worker gives its pool back, or an operator has it ended, and waits for that."""

    connection: int
    worker: str


class Lent(Struct, frozen=True, gc=False):
    """The worker on `connection` gets the pool; the descriptor of `memory` stays the pools actor's.

    `kept` says whether the bytes are older than this attach; `tenancy` changes when another worker gets the pool.
    """

    connection: int
    pool: Pool
    memory: Memory
    kept: bool
    tenancy: int


class Workers(Struct, frozen=True):
    """Whom the pools actor tells about the attaches of workers; connections are those of the session socket."""

    lent: Callable[[Lent], None]
    returned: Callable[[int], None]
    """The detach on this connection is complete."""
    refused: Callable[[int, KvdError], None]
    """The attach or detach on this connection is refused, or its worker has lost its pool."""
    renewed: Callable[[Pool], None]
    """The pool of an attached worker is registered anew: it has another epoch."""
    released: Callable[[int], None]
    """No pool depends any more on the end of the process that opened this connection."""
    discard: Callable[[tuple[int, ...]], None]
    """Closes the descriptors that came with an attach, and are not needed."""


class Watcher(Protocol):
    """Is told which pools there are, by calls."""

    def pool_up(self, pool: Pool) -> None:
        """A pool is registered: the transport's metadata includes it."""

    def pool_down(self, pool: Pool, *, keys_end: bool) -> None:
        """A pool is gone; it was quiet. Unless its keys end with it, it comes back, and whoever has them reads it."""


class User(Watcher, Protocol):
    """Reads from pools or writes to them."""

    actor: Actor
    """Whose part it is, or itself."""

    def quiesce(self, pool: Pool, why: str, *, force: bool) -> None:
        """Takes no new work for a pool, and has `PoolsActor.quiesced` called when none is left.

        Unclaimed offers are withdrawn and pulls are cancelled; `force` breaks claimed offers too.
        """
