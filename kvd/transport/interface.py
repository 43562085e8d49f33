"""What the daemon asks of a transport, and what it is told: commands in, events out, nothing shared.

The interface is message-shaped so that an implementation may run on a thread of its own (NIXL does) or in a process of
its own. Commands never block and never raise for what a peer did. `tests.conformance` holds the tests that every
implementation passes.

The rules:

1. Every `read` ends in exactly one `Landed` or `ReadFailed`, and not before nothing can write to its destination any
   more. There is no time limit here: a read that hangs stays open, and its blocks with it.
2. `abort` makes a read end early where it can: parts not yet handed to the network are dropped. It still ends by rule
   1, as `Landed` where nothing was left to drop.
3. `add_peer` of a name that is known already takes the new metadata in; `remove_peer` waits for the open reads of that
   peer, and an `add_peer` that arrives before then keeps the peer.
4. Short reads overtake long ones, and no read starves.
5. A stamp is read after the last byte of its read, so what it says was true when all bytes had been read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from kvd.plan import Descriptors


class Registered(Struct, frozen=True, gc=False):
    """Memory is registered: `metadata` is what peers need to reach everything that this agent has registered now."""

    pool: int
    metadata: bytes


class Deregistered(Struct, frozen=True, gc=False):
    """Memory is registered no more, and may be unmapped."""

    pool: int
    metadata: bytes


class Described(Struct, frozen=True, gc=False):
    """What peers need to reach these registrations and no others; those that have ended meanwhile are left out."""

    pools: tuple[int, ...]
    metadata: bytes


class RegisterFailed(Struct, frozen=True, gc=False):
    """Memory could not be registered."""

    pool: int
    reason: str


class PeerAdded(Struct, frozen=True, gc=False):
    """Reads from `agent` may start; `path` says how the bytes will travel where the transport knows (else empty)."""

    agent: str
    path: str = ""


class PeerFailed(Struct, frozen=True, gc=False):
    """The metadata of `agent` was of no use, or the connection to it broke: it is not known any more."""

    agent: str
    reason: str


class Landed(Struct, frozen=True, gc=False):
    """Every byte of the read is in place. `seconds` is the time from its first post to its last byte.

    `in_post` says that the kernel copied all of it out of the living process while it was posted: the other side's
    transport had no part in it, nor had a NIC. Where nobody knows by which path the bytes came, it is False.
    `stamp` is what lay at the address of the read's stamp after that; 0 where there was none, or it was not read.
    """

    read: int
    seconds: float
    in_post: bool = False
    stamp: int = 0


class ReadFailed(Struct, frozen=True, gc=False):
    """The read ended without all its bytes, and nothing writes to its destination any more."""

    read: int
    reason: str
    aborted: bool = False


class Answered(Struct, frozen=True, gc=False):
    """The transport ran `ping(number)`: whatever it runs on turns."""

    number: int


class TransportDied(Struct, frozen=True, gc=False):
    """The transport cannot go on (its thread raised): the daemon must stop."""

    reason: str


Event = (
    Registered
    | Deregistered
    | Described
    | RegisterFailed
    | PeerAdded
    | PeerFailed
    | Landed
    | ReadFailed
    | Answered
    | TransportDied
)


class Transport(Protocol):
    """One agent: it registers local memory and reads remote memory into it."""

    @property
    def agent(self) -> str:
        """The name under which peers add this agent."""

    @property
    def metadata(self) -> bytes:
        """What a peer needs to add this agent, as of the last `Registered`; untrusted input on the other side."""

    def start(self, on_event: Callable[[Event], None]) -> None:
        """Starts; `on_event` is called on the daemon's loop, in the order of the events, perhaps within a command."""

    def register(self, pool: int, base: int, size: int) -> None:
        """Registers `size` bytes at address `base`; answered by `Registered` or `RegisterFailed`."""

    def deregister(self, pool: int) -> None:
        """Ends a registration that no open read uses; answered by `Deregistered`."""

    def describe(self, pools: tuple[int, ...]) -> None:
        """Asks for metadata that leads to the registrations of `pools` and to no others; answered by `Described`."""

    def add_peer(self, agent: str, metadata: bytes) -> None:
        """Makes `agent` reachable and connects ahead of the first read; answered by `PeerAdded` or `PeerFailed`."""

    def remove_peer(self, agent: str) -> None:
        """Forgets `agent` once its reads have ended. No answer."""

    def read(
        self, read: int, agent: str, local_base: int, remote_base: int, descriptors: Descriptors, *, stamp: int = 0
    ) -> None:
        """Reads `descriptors.length[i]` bytes at `remote_base + src[i]` of `agent` into `local_base + dst[i]`.

        Where `stamp` is not 0, the 8 bytes at that address of `agent` (little-endian) are read when all others are in
        place, not before, and told in `Landed`.
        """

    def abort(self, read: int) -> None:
        """Asks for an early end of a read; unknown and ended reads are ignored."""

    def expect_connection(self) -> None:
        """A peer has been given this agent's metadata and will connect: it is answered promptly for a while."""

    def expect_readers(self, expected: bool) -> None:
        """Whether peers are about to read from this agent: while they are, it answers them promptly."""

    def ping(self, number: int) -> None:
        """Asks whether the transport turns; answered by `Answered`."""

    def stop(self) -> None:
        """Ends everything in order, waiting for it. Reads that are open get no event any more."""
