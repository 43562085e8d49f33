"""What the scheduler actor is told."""

from msgspec import Struct

from kvd.actors.runtime.messages import LeaseAnswer, PeerView, Pool
from kvd.protocol import worker as worker_protocol
from kvd.protocol.ticket import Ticket


class StartPull(Struct, frozen=True, gc=False):
    """A worker's pull; its ticket has been decoded and its blocks checked."""

    pool: Pool
    pull: worker_protocol.Pull
    ticket: Ticket


class CancelRequest(Struct, frozen=True, gc=False):
    """Cancels a pull or withdraws an offer; the scheduler passes it on to the leases if it knows no such pull."""

    worker: str
    cancel: worker_protocol.Cancel


class EndHolds(Struct, frozen=True, gc=False):
    """The worker's session has ended: nobody is there for whom offers should be held. Its pulls go on."""

    worker: str


class PeerUp(Struct, frozen=True, gc=False):
    """A peer is ready, or has told us about its pools again."""

    view: PeerView


class PeerDown(Struct, frozen=True, gc=False):
    """Requests to this peer are lost. If `restarted`, it runs under another incarnation and is being greeted."""

    address: str
    reason: str
    restarted: bool = False


class PeerIdle(Struct, frozen=True, gc=False):
    """No pull has needed this peer for long; answered by `ForgetPeer` unless one will.

    `announced` says how often `PeerUp` has been told of it; the answer repeats it.
    """

    address: str
    announced: int


class PeerReply(Struct, frozen=True, gc=False):
    """An answer of a peer to a request for a transfer."""

    address: str
    reply: LeaseAnswer
