"""What the leases actor is told."""

from msgspec import Struct

from kvd.actors.runtime.messages import LeaseRequest, Pool
from kvd.protocol import worker as worker_protocol


class OfferBlocks(Struct, frozen=True, gc=False):
    """A worker's offer; its blocks have been checked."""

    pool: Pool
    offer: worker_protocol.Offer


class FindLeased(Struct, frozen=True, gc=False):
    """From the pools actor: of which pools do offers stand? Answered by `LeasedPools`."""


class PeerRequest(Struct, frozen=True, gc=False):
    """A request of a peer about leases. `sender` is its routing id; `peer` is the same for all its runs and links."""

    sender: bytes
    peer: str
    request: LeaseRequest
