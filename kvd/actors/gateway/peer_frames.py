"""What peers send: checked, and passed on to handshake, leases and scheduler.

Requests about leases go from the peer socket to the leases, answers about claims to the scheduler, neither by way of
the handshake's mailbox. All of them do, so that those of one peer stay in order. What a peer may read is looked up for
each request, by the public key that it proved.
"""

import msgspec

from kvd import limits
from kvd.actors.handshake.actor import HandshakeActor
from kvd.actors.handshake.peer_server import Greeting, PeerServer, Rights, covers
from kvd.actors.handshake.peers import PeerChannel, Peers
from kvd.actors.leases.claims import Claims
from kvd.actors.runtime.actor import call
from kvd.actors.runtime.context import ActorContext
from kvd.actors.scheduler.transfers import Transfers
from kvd.errors import BadRequest, ErrorCode
from kvd.net.interface import PeerAnswered, PeerAsked, PeerEvent
from kvd.protocol import codec
from kvd.protocol.peer import (
    Claim,
    Fence,
    Follow,
    Hello,
    LeaseRequest,
    Ping,
    Pong,
    Refuse,
    Release,
    Renew,
    Settle,
    Welcome,
)


class PeerFrames:
    """`received` is the peer socket's callback."""

    def __init__(
        self,
        context: ActorContext,
        peers: Peers,
        channel: PeerChannel,
        rights: Rights,
        *,
        server: PeerServer,
        handshake: HandshakeActor,
        claims: Claims,
        transfers: Transfers,
    ) -> None:
        self._context = context
        self._peers = peers
        self._channel = channel
        self._rights = rights
        self._server = server
        self._handshake = handshake
        self._claims = claims
        self._transfers = transfers

    def received(self, event: PeerEvent) -> None:
        """Passes on one frame of a peer. Garbage is refused if it is a request, and dropped if it is an answer."""
        try:
            if isinstance(event, PeerAsked):
                self._requested(event)
            else:
                self._answered(event)
        except BadRequest as error:
            self._context.metrics.refused.labels("peer", error.code).inc()
            if isinstance(event, PeerAsked):
                self._channel.answer(event.sender, Refuse(0, error.code, error.text[: limits.MAX_ERROR_TEXT]))

    # --- peers that connect to us -----------------------------------------------------------------------------------

    def _requested(self, event: PeerAsked) -> None:
        request = codec.peer_requests.decode(event.frame)
        if isinstance(request, Ping):
            call(self._server.pinged, event.sender, request)
        elif isinstance(request, Hello):
            call(self._server.greeted, Greeting(event.sender, event.key, _peer_of(event), request))
        elif (permitted := self._permitted(event, request)) is not None:
            call(self._claims.requested, event.sender, _peer_of(event), permitted)

    def _permitted(self, event: PeerAsked, request: LeaseRequest) -> LeaseRequest | None:
        """The request without what concerns pools that this peer may not read; a claim of such a pool is refused."""
        patterns = self._rights(event.key)
        forbidden = {pool for pool in _pools_in(request) if not covers(patterns, pool)}
        if not forbidden:
            return request
        self._context.metrics.refused.labels("peer", ErrorCode.NOT_PERMITTED).inc()
        match request:
            case Fence():
                return _without_claim(request, forbidden)
            case Settle():
                return Settle(tuple(_without_claim(fence, forbidden) for fence in request.fences))
            case Claim():
                text = f"this daemon may not read the pool {request.pool!r}; name it in its line of `curve_peers` there"
                self._channel.answer(event.sender, Refuse(request.claim, ErrorCode.NOT_PERMITTED, text))
                return None
            case Renew() | Follow() | Release():  # they name no pool
                return request

    # --- peers that we connect to -----------------------------------------------------------------------------------

    def _answered(self, event: PeerAnswered) -> None:
        peer = self._peers.by_link.get(event.link)
        if peer is None:
            return
        reply = codec.peer_replies.decode(event.frame)
        peer.hears(self._context.loop.time())
        if isinstance(reply, Welcome | Pong) or (isinstance(reply, Refuse) and reply.claim == 0):
            call(self._handshake.replied, event.link, reply)
        else:
            call(self._transfers.answered, peer.address, reply)


def _peer_of(event: PeerAsked) -> str:
    """The key of a peer if it has proved one; else the name that it gives itself, without the `#` of its run."""
    return event.key or event.sender.partition(b"#")[0].decode(errors="replace")


def _pools_in(request: LeaseRequest) -> tuple[str, ...]:
    """The pools that a request names."""
    if isinstance(request, Claim):
        return (request.pool,)
    fences = request.fences if isinstance(request, Settle) else (request,) if isinstance(request, Fence) else ()
    return tuple(fence.unclaimed.pool for fence in fences if fence.unclaimed is not None)


def _without_claim(fence: Fence, forbidden: set[str]) -> Fence:
    """A fence on a read that was not claimed does not hold without its claim."""
    if fence.unclaimed is None or fence.unclaimed.pool not in forbidden:
        return fence
    return msgspec.structs.replace(fence, unclaimed=None)
