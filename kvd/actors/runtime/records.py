"""Records that pass between actors: our pools, and peers that are ready.

The garbage collector does not track them.
"""

from collections.abc import Mapping

from msgspec import Struct

from kvd.actors.runtime.blocks import BlocksInUse
from kvd.layout import CacheSpec
from kvd.protocol.peer import Grant
from kvd.protocol.ticket import TicketRank


class Pool(Struct, frozen=True, gc=False):
    """A pool of this daemon, registered with the transport. `base` is an address, `size` bytes."""

    id: int
    name: str
    """That of the worker that it is lent to, and of its successors."""
    epoch: int
    base: int
    size: int
    spec: CacheSpec
    raw_spec: bytes
    blocks: BlocksInUse
    uid: int
    """The user that it belongs to."""


class PeerPool(Struct, frozen=True, gc=False):
    """A pool of a peer."""

    epoch: int
    base: int
    size: int
    spec: CacheSpec


class PeerView(Struct, frozen=True, gc=False):
    """A peer that is ready: its transport agent and its pools by name."""

    address: str
    daemon: str
    incarnation: int
    agent: str
    pools: Mapping[str, PeerPool]
    same_host: bool = False
    """Whether its transport has no part in reads from it."""
    stamps: int = 0
    """Address of its first stamp; 0 if it has none, or if its process cannot be read."""

    def told_of(self, pool: PeerPool, named: Grant | TicketRank) -> bool:
        """Whether `named` means this very pool that the peer has told us about: of its run, registered that time."""
        return (named.incarnation, named.epoch) == (self.incarnation, pool.epoch)
