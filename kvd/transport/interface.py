"""What the daemon asks of a transport, and what it reports: commands in, events out, nothing shared.

An implementation may run on threads or in a process of its own (NIXL does; events are tagged for that). Commands never
block, and never raise because of what a peer did. `tests.conformance` holds the tests that every implementation passes.

The rules:

1. Every `read` ends in exactly one `Landed` or `ReadFailed`, and only once nothing can write to its destination any
   more. There is no time limit: a read that hangs stays open, and so do its blocks.
2. `abort` ends a read early if it can: parts not yet handed to the network are dropped. The read still ends by rule 1,
   as `Landed` if nothing was left to drop.
3. `add_peer` of a known name takes in the new metadata; until that is answered, reads may find what was there before.
   If it is called again before it was answered, only the last call need be. `remove_peer` waits for the peer's open
   reads; an `add_peer` that arrives before then keeps the peer.
4. Short reads overtake long ones, all overtake parts of what is still to come, and no read starves.
5. A stamp is read after the last byte of its read, out of the living process: what it says was still true when all
   bytes had been read. Memory may outlive its process, so bytes may land after the process has ended; stamps do not.
6. A read that expects a stamp moves nothing unless it is there before the first byte. Where no stamps can be read it
   never is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Protocol

from msgspec import Meta, Struct

from kvd import limits

if TYPE_CHECKING:
    from kvd.plan import Descriptors

OwnMetadata = Annotated[bytes, Meta(max_length=limits.MAX_OWN_METADATA_BYTES)]
_Text = Annotated[str, Meta(max_length=2 * limits.MAX_ERROR_TEXT)]
_Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
"""Bounds for decoders: a process that says more, or what is no number, is not heard."""


class Region(Struct, frozen=True, gc=False):
    """`size` bytes at address `base` of this process.

    `descriptor` maps to the same bytes, `length` of them, in other processes; -1 if nothing does. `device` is the UUID
    of the GPU that has them; empty for host memory. What is `hidden` is read into only: no metadata tells of it.
    """

    base: int
    size: int
    descriptor: int = -1
    device: str = ""
    length: int = 0
    hidden: bool = False


class ReadRequest(Struct, frozen=True, gc=False):
    """Read `descriptors.length[i]` bytes at `remote_base + src[i]` of `agent` into `local_base + dst[i]`.

    `read` is the caller's number for it. Bases are addresses, the remote one in the process of `agent`. If `stamp` is
    not 0, the `limits.STAMP_BYTES` at that address of `agent` (little-endian) are read after all others and returned in
    `Landed`. If `expected` is not 0, they must be it before the first byte is read, too: else the read fails as
    `unproven`. Pass them only if `PeerAdded` said that stamps can be read. A read that is a `part` of what is still to
    come gives way to those that somebody waits for.
    """

    read: int
    agent: str
    local_base: int
    remote_base: int
    descriptors: Descriptors
    stamp: int = 0
    expected: int = 0
    part: bool = False

    def unproven(self) -> ReadFailed:
        """Its end if the stamp that it expects is not there."""
        text = f"no stamp at {self.stamp:#x} of agent {self.agent!r} proves the lease: nothing was read"
        return ReadFailed(self.read, text, unproven=True)


class Registered(Struct, frozen=True, gc=False, tag=True):
    """Memory is registered. `metadata` is what peers need to reach all that is registered now, and not hidden."""

    pool: int
    metadata: OwnMetadata


class Deregistered(Struct, frozen=True, gc=False, tag=True):
    """Memory is no longer registered and may be unmapped."""

    pool: int
    metadata: OwnMetadata


class Described(Struct, frozen=True, gc=False, tag=True):
    """What peers need to reach these registrations and no others; registrations that have ended are left out."""

    pools: tuple[int, ...]
    metadata: OwnMetadata


class RegisterFailed(Struct, frozen=True, gc=False, tag=True):
    """Memory could not be registered."""

    pool: int
    reason: _Text


class PeerAdded(Struct, frozen=True, gc=False, tag=True):
    """Reads from `agent` may start, of what `metadata`, which was given by `add_peer`, tells of.

    `path` names the transports that carry the bytes (see `kvd.transport.path`). `same_host` says that its transport has
    no part in them: they need no answer of its process. `stamps` says that words can be read out of its living process.
    """

    agent: str
    metadata: bytes
    path: _Text = ""
    same_host: bool = False
    stamps: bool = False
    detour: str = ""
    """Why the transport of other hosts reads it though it may be on this one; empty if it does not."""


class PeerFailed(Struct, frozen=True, gc=False, tag=True):
    """The metadata of `agent` was unusable, or the connection broke: the peer is forgotten, and no read of it lands."""

    agent: str
    reason: _Text


class Landed(Struct, frozen=True, gc=False, tag=True):
    """Every byte of the read is in place. `seconds` is the time from its first post to its last byte.

    `stamp` is what lay at the read's stamp address after that, in the living process; 0 if none was requested, or if
    it could not be read.
    """

    read: int
    seconds: _Seconds
    stamp: int = 0


class ReadFailed(Struct, frozen=True, gc=False, tag=True):
    """The read ended without all its bytes, and nothing writes to its destination any more.

    If it is `unproven`, the stamp that it expects was not there, and nothing was read.
    """

    read: int
    reason: _Text
    aborted: bool = False
    unproven: bool = False


class Answered(Struct, frozen=True, gc=False, tag=True):
    """The transport ran `ping(number)`: it is alive. `crowded`, if its process has most of its descriptors in use.

    `few_addresses`, if pools that have ended have left its process few of them.
    """

    number: int
    crowded: bool = False
    few_addresses: bool = False


class Notified(Struct, frozen=True, gc=False, tag=True):
    """A message came by `Network.notify`. Whoever reaches the transport's port can send any, under any name."""

    agent: Annotated[str, Meta(max_length=limits.MAX_AGENT_BYTES)]
    content: Annotated[bytes, Meta(max_length=limits.MAX_NOTIFICATION_BYTES)]


class NetworkDown(Struct, frozen=True, gc=False, tag=True):
    """The process that reads from other hosts has ended, or has not started, and is started again until it stays.

    Its reads and its peers fail with it, and nothing that it had open is written to any more. What was registered stays
    so, under new keys: `metadata` is right again with `NetworkUp`.
    """

    reason: str


class NetworkUp(Struct, frozen=True, gc=False, tag=True):
    """It runs again, and everything is registered with it: peers need this `metadata` from now on."""

    metadata: bytes


class TransportDied(Struct, frozen=True, gc=False, tag=True):
    """The transport cannot go on, as a thread of it raised or its GPU is lost: the daemon must stop."""

    reason: str


AgentEvent = (
    Registered | Deregistered | Described | RegisterFailed | PeerAdded | PeerFailed | Landed | ReadFailed | Answered
)
"""What became of what an agent was asked, or of a peer."""
Event = AgentEvent | NetworkDown | NetworkUp | TransportDied
NetworkEvent = Event | Notified


class _Agent(Protocol):
    """One agent: it registers local memory and reads remote memory into it."""

    @property
    def agent(self) -> str:
        """The name under which peers add this agent."""

    @property
    def metadata(self) -> bytes:
        """What a peer needs to add this agent, as of the last event; peers treat it as untrusted input."""

    def register(self, pool: int, region: Region) -> None:
        """Registers memory; answered by `Registered` or `RegisterFailed`. Its descriptor stays the caller's."""

    def describe(self, pools: tuple[int, ...]) -> None:
        """Asks for metadata that covers the registrations of `pools` only; answered by `Described`."""

    def add_peer(self, agent: str, metadata: bytes, address: str = "") -> None:
        """Makes `agent` reachable and connects ahead of the first read; answered by `PeerAdded` or `PeerFailed`.

        `address` is where its daemon said that, as `kvd.protocol.address` has it; empty if nobody knows.
        """

    def remove_peer(self, agent: str) -> None:
        """Forgets `agent` once its reads have ended. No answer."""

    def read(self, request: ReadRequest) -> None:
        """Starts a read; its number must not be that of an open one. It ends in `Landed` or `ReadFailed`."""

    def abort(self, read: int) -> None:
        """Asks for an early end of a read; unknown and ended reads are ignored."""

    def expect_connection(self) -> None:
        """A peer has this agent's metadata and will connect: for a while, answer it promptly."""

    def expect_readers(self, expected: bool) -> None:
        """Whether peers are about to read from this agent: while they are, answer them promptly."""

    def ping(self, number: int) -> None:
        """Asks for a sign of life; answered by `Answered`."""

    def stop(self) -> None:
        """Shuts down in order and waits for it. Open reads get no more events."""


class Transport(_Agent, Protocol):
    """What the daemon has."""

    def deregister(self, pool: int, *, returns: bool = False) -> None:
        """Ends a registration that no open read uses; answered by `Deregistered`.

        If it `returns`, the pool is registered again afterwards, and what that takes is kept for it.
        """

    def start(self, on_event: Callable[[Event], None]) -> None:
        """Starts. `on_event` is called on the daemon's loop, in the order of the events, perhaps within a command."""


class Network(_Agent, Protocol):
    """A transport to other hosts, which passes messages between agents, too; below a `Transport` that takes these."""

    def start(self, on_event: Callable[[NetworkEvent], None]) -> None:
        """As `Transport.start`."""

    def deregister(self, pool: int) -> None:
        """Ends a registration that no open read uses; answered by `Deregistered`."""

    def notify(self, agent: str, content: bytes) -> None:
        """Sends a message of up to `limits.MAX_NOTIFICATION_BYTES` to a peer, whose agent is `Notified` of it.

        Messages to one peer come in order. What cannot be sent is lost without a word: the peer is lost, too.
        """
