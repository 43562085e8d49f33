"""The gateway: checks everything that workers and peers send, and passes it to the other actors.

The requests are decoded and checked here, so that no other actor sees an unchecked block id.
"""

from collections.abc import Callable

import msgspec

from kvd import limits
from kvd.actors.completion.actor import CompletionActor, Session, Sessions
from kvd.actors.gateway.admission import Admission, Policy
from kvd.actors.gateway.connections import Connections
from kvd.actors.handshake.actor import HandshakeActor
from kvd.actors.handshake.peer_server import Greeting, PeerServer, Rights, covers
from kvd.actors.handshake.peers import PeerChannel, Peers
from kvd.actors.leases.actor import LeasesActor
from kvd.actors.leases.claims import Claims
from kvd.actors.pools.actor import PoolsActor
from kvd.actors.runtime.actor import Actor, Background, OnFailure, call, run
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.pools import check_spans
from kvd.actors.scheduler.actor import SchedulerActor
from kvd.actors.scheduler.transfers import Transfers
from kvd.errors import BadRequest, ErrorCode, KvdError, refusal
from kvd.net.interface import (
    PeerAnswered,
    PeerAsked,
    PeerEvent,
    ProcessEnded,
    SessionClosed,
    SessionFrame,
    SessionOpened,
    WorkerEvent,
    WorkerFrame,
    WorkerPort,
)
from kvd.protocol import codec, ticket
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
from kvd.protocol.status import ProcessStatus, StatusReport
from kvd.protocol.worker import Acknowledge, Cancel, Extend, Offer, Pull, Request, Status, StatusRequest


class PeerFrames:
    """Checks what peers send, and passes it on; `received` is the peer socket's callback.

    Requests about leases go from the peer socket to the leases, answers about claims to the scheduler, neither by way
    of the handshake's mailbox. All of them do, so that those of one peer stay in order. What a peer may read is looked
    up for each request, by the public key that it proved.
    """

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
                self._channel.answer(event.sender, Refuse(0, error.code, error.text))

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


class GatewayActor(Actor):
    """A failure concerns one message of one worker: it is reported, and the others go on.

    `describe` gives what no actor reports in a status.
    """

    name = "gateway"
    on_failure = OnFailure.RESUME

    def __init__(
        self,
        context: ActorContext,
        port: WorkerPort,
        *,
        sessions: Sessions,
        pools: PoolsActor,
        handshake: HandshakeActor,
        leases: LeasesActor,
        scheduler: SchedulerActor,
        completion: CompletionActor,
        peer_address: Callable[[], str],
        draw_session: Callable[[], bytes],
        describe: Callable[[], ProcessStatus],
        policy: Policy,
        background: Background,
    ) -> None:
        super().__init__(context.dispatcher)
        self._context = context
        self._describe = describe
        self._sessions = sessions
        self._pools = pools
        self._handshake = handshake
        self._leases = leases
        self._scheduler = scheduler
        self._completion = completion
        self._admission = Admission(policy, context.loop)
        self.connections = Connections(
            self,
            context,
            port,
            admission=self._admission,
            sessions=sessions,
            status=self._status,
            peer_address=peer_address,
            draw_session=draw_session,
            background=background,
            pools=pools,
            scheduler=scheduler,
            leases=leases,
            completion=completion,
        )

    def received(self, event: WorkerEvent) -> None:
        """Takes an event of the workers' sockets."""
        match event:
            case WorkerFrame():
                call(self.requested, event)
            case SessionFrame():
                call(self.connections.received, event)
            case SessionOpened():
                call(self.connections.opened, event)
            case SessionClosed():
                call(self.connections.closed, event)
            case ProcessEnded():
                call(self.connections.process_ended, event)

    def requested(self, event: WorkerFrame) -> None:
        """One request, checked and passed on, or refused."""
        session = self._sessions.find(event.session)
        if session is not None and event.uid != session.uid:
            # Not answered: an answer would travel to the session's owner.
            self._context.metrics.refused.labels("worker", ErrorCode.NOT_PERMITTED).inc()
            self._admission.stolen(session.pool.name, session.uid, event.uid)
            return
        number = 0
        try:
            if session is None:
                self._admission.unknown(event.uid)
                raise refusal(ErrorCode.NOT_ATTACHED, "this routing id belongs to no session; attach first")
            request = codec.worker_requests.decode(event.frame)
            number = getattr(request, "call", 0)
            self._route(request, session)
        except KvdError as error:
            self._sessions.refuse_frame(event.session, number, error)

    def _route(self, request: Request, session: Session) -> None:
        worker = session.pool.name
        match request:
            case Pull():
                self._check_new(request, session)
                if not limits.MIN_PULL_TIMEOUT <= request.timeout <= limits.MAX_PULL_TIMEOUT:
                    bounds = f"{limits.MIN_PULL_TIMEOUT} to {limits.MAX_PULL_TIMEOUT}"
                    text = f"timeout is {request.timeout} s; it may be {bounds}"
                    raise refusal(ErrorCode.BAD_MESSAGE, text)
                if request.hold and request.spans:
                    raise refusal(ErrorCode.BAD_MESSAGE, "a pull that only holds an offer has no blocks")
                run(self._scheduler.start, session.pool, request, ticket.decode(request.ticket))
            case Offer():
                self._check_new(request, session)
                run(self._leases.offer, session.pool, request)
            case Extend():
                self._admission.take_request(session.connection)
                check_spans(request.spans, session.pool.spec)
                run(self._leases.extend, worker, request)
            case Acknowledge():
                run(self._completion.acknowledged, worker, request.sequence)
            case Cancel():
                run(self._scheduler.cancel, worker, request)
            case StatusRequest():
                self._admission.take_status(session.uid, session.connection)
                self._sessions.answer(worker, self._status(request.call))

    def _check_new(self, request: Pull | Offer, session: Session) -> None:
        self._admission.check_open()
        if self._completion.is_full(session.pool.name):
            text = f"{limits.MAX_UNACKNOWLEDGED} notifications are unacknowledged; poll the client, then try again"
            raise refusal(ErrorCode.OVERLOADED, text)
        self._admission.take_request(session.connection)
        check_spans(request.spans, session.pool.spec)

    def _status(self, number: int) -> Status:
        """The answer to the request for a status of that number."""
        report = StatusReport(
            **msgspec.structs.asdict(self._describe()),
            workers=self._sessions.workers,
            worker_pids=self._sessions.pids,
            pools=self._pools.report(),
            handshake=self._handshake.report(),
            leases=self._leases.report(),
            scheduler=self._scheduler.report(),
            completion=self._completion.report(),
        )
        return Status(number, msgspec.json.encode(report))

    def drain(self) -> None:
        """Nothing new is accepted; what was accepted still gets its outcome."""
        self._admission.close()
