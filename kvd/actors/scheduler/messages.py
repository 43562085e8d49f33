"""What the scheduler actor is told."""

from msgspec import Struct

from kvd.actors.runtime.messages import LeaseAnswer, PeerView, Pool
from kvd.protocol import worker as worker_protocol
from kvd.protocol.ticket import Ticket


class StartPull(Struct, frozen=True, gc=False):
    """A worker's pull, its ticket read and its blocks checked."""

    pool: Pool
    pull: worker_protocol.Pull
    ticket: Ticket


class CancelRequest(Struct, frozen=True, gc=False):
    """To the scheduler, which passes it on to the leases where it knows no such pull."""

    worker: str
    cancel: worker_protocol.Cancel


class PeerUp(Struct, frozen=True, gc=False):
    """A peer is ready, or has told about its pools again."""

    view: PeerView


class PeerDown(Struct, frozen=True, gc=False):
    """What was asked of this peer is lost. If `restarted` it is there, under another incarnation, and being greeted."""

    address: str
    reason: str
    restarted: bool = False


class PeerIdle(Struct, frozen=True, gc=False):
    """Nothing was asked of this peer for long; answered by `ForgetPeer` unless a pull will need it."""

    address: str


class PeerReply(Struct, frozen=True, gc=False):
    """An answer of a peer that concerns transfers."""

    address: str
    reply: LeaseAnswer
