"""What the leases actor is told."""

from msgspec import Struct

from kvd.actors.runtime.messages import Pool
from kvd.protocol import peer as peer_protocol
from kvd.protocol import worker as worker_protocol


class OfferBlocks(Struct, frozen=True, gc=False):
    """A worker's offer, its blocks checked."""

    pool: Pool
    offer: worker_protocol.Offer


class PeerRequest(Struct, frozen=True, gc=False):
    """A request of a peer that concerns leases. `peer` is who it is, whatever its run and its connection."""

    sender: bytes
    peer: str
    request: (
        peer_protocol.Claim | peer_protocol.Renew | peer_protocol.Fence | peer_protocol.Settle | peer_protocol.Release
    )
