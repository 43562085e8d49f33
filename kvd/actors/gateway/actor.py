"""The gateway: the only actor that workers talk to. It reads and checks what they send, and sends what others say.

Every frame of a worker is decoded and checked here, so that no other actor sees an unchecked block id.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from msgspec import Struct

from kvd import limits
from kvd.actors.completion.messages import Acknowledged, Forget, SessionDown, SessionUp, Undelivered
from kvd.actors.gateway.admission import Admission, Allowance
from kvd.actors.gateway.messages import (
    Answer,
    AttachRefused,
    Backlog,
    PoolLent,
    PoolRenewed,
    PoolReturned,
    Refusal,
    Reported,
)
from kvd.actors.gateway.policy import Policy
from kvd.actors.gateway.statuses import Statuses
from kvd.actors.leases.messages import OfferBlocks
from kvd.actors.pools.messages import AttachPool, DetachPool, WorkerGone
from kvd.actors.runtime.actor import Actor, OnFailure, handles
from kvd.actors.runtime.background import Background
from kvd.actors.runtime.blocks import check_spans
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.deadlines import Deadlines
from kvd.actors.runtime.messages import Drain, Pool, Stop
from kvd.actors.scheduler.messages import CancelRequest, StartPull
from kvd.errors import BadRequest, ErrorCode, KvdError, Unavailable
from kvd.layout import CacheSpec
from kvd.net.interface import SessionClosed, SessionFrame, SessionOpened, WorkerFrame, WorkerPort
from kvd.protocol import codec, ticket
from kvd.protocol.types import VERSION
from kvd.protocol.worker import (
    Acknowledge,
    Attach,
    Attached,
    Cancel,
    Detach,
    Detached,
    Error,
    Notifications,
    Offer,
    Pull,
    Refused,
    Request,
    StatusRequest,
)


@dataclass(slots=True)
class _Connection:
    """One process on the session socket."""

    pid: int
    uid: int
    gid: int
    allowance: Allowance
    worker: str = ""
    """Set from its attach on."""


@dataclass(slots=True)
class _Session:
    """One worker that has its pool."""

    id: bytes
    connection: int
    uid: int
    pool: Pool
    allowance: Allowance
    backlogged: bool = False


class _SpecRead(Struct, frozen=True):
    event: SessionFrame
    request: Attach
    quota: int | None
    result: CacheSpec | KvdError


class _Idle(Struct, frozen=True, gc=False):
    connection: int


class GatewayActor(Actor):
    """See the module's text. A failure concerns one message of one worker: it is reported, and the others go on."""

    name = "gateway"
    on_failure = OnFailure.RESUME

    def __init__(
        self,
        context: ActorContext,
        port: WorkerPort,
        *,
        peer_address: Callable[[], str],
        draw_session: Callable[[], bytes],
        describe: Callable[[], dict[str, object]],
        policy: Policy,
        background: Background,
    ) -> None:
        super().__init__(context.dispatcher)
        self._context = context
        self._port = port
        self._peer_address = peer_address
        self._draw_session = draw_session
        self._background = background
        self._admission = Admission(policy, context.loop)
        self._connections: dict[int, _Connection] = {}
        self._idle: Deadlines[int] = Deadlines(context.loop, lambda number: self.tell(_Idle(number)))
        """Connections that have no pool and wait for none."""
        self._by_worker: dict[str, _Session] = {}
        self._by_id: dict[bytes, _Session] = {}
        self._statuses = Statuses(context, lambda: {**describe(), "workers": sorted(self._by_worker)})
        self._closing: Unavailable | None = None

    # --- sessions ---------------------------------------------------------------------------------------------------

    @handles(SessionOpened)
    def opened(self, event: SessionOpened) -> None:
        """Somebody connected; who, the kernel says."""
        try:
            self._admission.enter(event.uid)
        except Unavailable as full:
            self._refuse_session(event.connection, full)
            self._port.close_session(event.connection)
            return
        self._connections[event.connection] = _Connection(event.pid, event.uid, event.gid, self._admission.allowance())
        self._has_no_pool(event.connection)

    def _has_no_pool(self, connection: int) -> None:
        """From now on it is hung up on, unless it asks for something."""
        self._connections[connection].worker = ""
        self._idle.set(connection, self.loop.time() + limits.SESSION_IDLE_SECONDS)

    @handles(_Idle)
    def idle(self, message: _Idle) -> None:
        """A connection that is of no use to its owner takes somebody else's place."""
        if message.connection in self._connections and not self._connections[message.connection].worker:
            text = f"nothing was asked for {limits.SESSION_IDLE_SECONDS:g} s; connect again when there is something"
            self._refuse_session(message.connection, Unavailable(ErrorCode.DEADLINE, text))
            self._port.close_session(message.connection)
            self.closed(SessionClosed(message.connection))

    @handles(SessionFrame)
    def session_frame(self, event: SessionFrame) -> None:
        """An attach, a detach, an operator's question, or garbage."""
        connection = self._connections.get(event.connection)
        if connection is None:
            self._port.discard(event.descriptors)
            return
        try:
            request = codec.session_requests.decode(event.frame)
            if not connection.worker:
                self._has_no_pool(event.connection)
            if isinstance(request, Attach):
                self._attach(event, connection, request)
                return  # what came along is the pools' now
            if isinstance(request, Detach):
                self._detach(event.connection, connection)
            else:
                number = event.connection
                if connection.worker:
                    connection.allowance.take_status()
                else:
                    self._admission.inquire(connection.uid)
                self._statuses.ask(request.call, lambda status: self._port.send_session(number, codec.encode(status)))
        except KvdError as error:
            self._refuse_session(event.connection, error)
        self._port.discard(event.descriptors)

    def _attach(self, event: SessionFrame, connection: _Connection, request: Attach) -> None:
        if request.version != VERSION:
            text = f"the daemon speaks version {VERSION} of the protocol, the worker {request.version}; use one release"
            raise BadRequest(ErrorCode.BAD_VERSION, text)
        if self._closing is not None:
            raise self._closing
        if connection.worker:
            raise BadRequest(ErrorCode.WRONG_STATE, f"this session is attached as {connection.worker!r} already")
        if len(event.descriptors) > 1:
            raise BadRequest(ErrorCode.BAD_MESSAGE, f"{len(event.descriptors)} descriptors came along; at most one may")
        quota = self._admission.admit(connection.uid, connection.gid, request.worker)
        connection.worker = request.worker
        self._idle.unset(event.connection)
        # Beside the loop: a long spec takes tens of milliseconds.
        self._background(
            partial(CacheSpec.decode, request.spec),
            lambda result: self.tell(_SpecRead(event, request, quota, result)),
        )

    @handles(_SpecRead)
    def spec_read(self, message: _SpecRead) -> None:
        """The spec of an attach is read, or is none; its sender may be gone."""
        event, request, spec = message.event, message.request, message.result
        connection = self._connections.get(event.connection)
        if connection is None:
            self._port.discard(event.descriptors)
        elif isinstance(spec, KvdError):
            self._port.discard(event.descriptors)
            self._has_no_pool(event.connection)
            self._refuse_session(event.connection, spec)
        else:
            self._context.pools.tell(
                AttachPool(
                    connection=event.connection,
                    worker=request.worker,
                    instance=request.instance,
                    uid=connection.uid,
                    spec=spec,
                    raw_spec=request.spec,
                    descriptor=event.descriptors[0] if event.descriptors else -1,
                    quota=message.quota,
                )
            )

    def _detach(self, number: int, connection: _Connection) -> None:
        session = self._by_worker.get(connection.worker)
        if session is None or session.connection != number:
            raise BadRequest(ErrorCode.NOT_ATTACHED, "this session has no pool; attach first")
        self._end_session(session)
        self._context.completion.tell(Forget(connection.worker))
        self._context.pools.tell(DetachPool(number, connection.worker))

    @handles(PoolLent)
    def pool_lent(self, message: PoolLent) -> None:
        """The pool is ready: the worker gets it, its session, and what it has not acknowledged."""
        if message.connection not in self._connections:
            self._context.pools.tell(WorkerGone(message.pool.worker, message.connection))
            return
        session = _Session(
            id=self._draw_session(),
            connection=message.connection,
            uid=self._connections[message.connection].uid,
            pool=message.pool,
            allowance=self._connections[message.connection].allowance,
        )
        self._by_worker[message.pool.worker] = session
        self._by_id[session.id] = session
        self._context.metrics.workers.set(len(self._by_worker))
        settings = self._context.settings
        attached = Attached(
            session=session.id,
            endpoint=self._port.endpoint,
            daemon=settings.daemon,
            incarnation=settings.incarnation,
            address=self._peer_address(),
            pool_bytes=message.pool.size,
            backing=message.backing,
            kept=message.kept,
            pool=message.tenancy,
        )
        self._port.send_session(message.connection, codec.encode(attached), (message.descriptor,))
        self._context.completion.tell(SessionUp(message.pool.worker, message.tenancy))

    @handles(PoolRenewed)
    def pool_renewed(self, message: PoolRenewed) -> None:
        """The same memory under another epoch: what is asked from now on is about that."""
        session = self._by_worker.get(message.pool.worker)
        if session is not None:
            session.pool = message.pool

    @handles(PoolReturned)
    def pool_returned(self, message: PoolReturned) -> None:
        """A detach is complete."""
        connection = self._connections.get(message.connection)
        if connection is not None:
            self._has_no_pool(message.connection)
            self._port.send_session(message.connection, codec.encode(Detached()))

    @handles(AttachRefused)
    def attach_refused(self, message: AttachRefused) -> None:
        """An attach or detach cannot be served; a worker that had its pool attaches again, and is told why then."""
        connection = self._connections.get(message.connection)
        session = self._by_worker.get(connection.worker) if connection is not None else None
        if session is not None and session.connection == message.connection:
            self._hang_up(session)
        elif connection is not None:
            self._has_no_pool(message.connection)
            self._refuse_session(message.connection, message.error)

    @handles(SessionClosed)
    def closed(self, event: SessionClosed) -> None:
        """A process is gone. Its pool and its transfers are not."""
        connection = self._connections.pop(event.connection, None)
        if connection is None:
            return
        self._admission.leave(connection.uid)
        self._idle.unset(event.connection)
        if not connection.worker:
            return
        session = self._by_worker.get(connection.worker)
        if session is not None and session.connection == event.connection:
            self._end_session(session)
        self._context.pools.tell(WorkerGone(connection.worker, event.connection))

    def _end_session(self, session: _Session) -> None:
        del self._by_worker[session.pool.worker]
        del self._by_id[session.id]
        self._context.metrics.workers.set(len(self._by_worker))
        self._context.completion.tell(SessionDown(session.pool.worker))

    def _refuse_session(self, connection: int, error: KvdError) -> None:
        self._context.metrics.refused.labels("session", error.code).inc()
        refused = Refused(error.code, error.text[: limits.MAX_ERROR_TEXT])
        self._port.send_session(connection, codec.encode(refused))

    # --- requests ---------------------------------------------------------------------------------------------------

    @handles(WorkerFrame)
    def worker_frame(self, event: WorkerFrame) -> None:
        """One request of a worker, checked and passed on to whom it concerns."""
        session = self._by_id.get(event.session)
        if session is not None and event.uid != session.uid:
            # Not answered: an answer would travel to the session's owner.
            self._context.metrics.refused.labels("worker", ErrorCode.NOT_PERMITTED).inc()
            self._admission.stolen(session.pool.worker, session.uid, event.uid)
            return
        call = 0
        try:
            if session is None:
                self._admission.unknown(event.uid)
                raise BadRequest(ErrorCode.NOT_ATTACHED, "this routing id belongs to no session; attach first")
            request = codec.worker_requests.decode(event.frame)
            call = getattr(request, "call", 0)
            self._route(request, session)
        except KvdError as error:
            self._refuse(event.session, call, error)

    def _route(self, request: Request, session: _Session) -> None:
        match request:
            case Pull():
                self._pull(request, session)
            case Offer():
                self._check_open(session)
                check_spans(request.spans, session.pool.spec)
                self._context.leases.tell(OfferBlocks(session.pool, request))
            case Acknowledge():
                self._context.completion.tell(Acknowledged(session.pool.worker, request.sequence))
            case Cancel():
                self._context.scheduler.tell(CancelRequest(session.pool.worker, request))
            case StatusRequest():
                session.allowance.take_status()
                worker = session.pool.worker
                self._statuses.ask(request.call, lambda status: self.answer(Answer(worker, status)))

    def _pull(self, request: Pull, session: _Session) -> None:
        self._check_open(session)
        if not limits.MIN_PULL_TIMEOUT <= request.timeout <= limits.MAX_PULL_TIMEOUT:
            text = f"timeout is {request.timeout} s; it may be {limits.MIN_PULL_TIMEOUT} to {limits.MAX_PULL_TIMEOUT}"
            raise BadRequest(ErrorCode.BAD_MESSAGE, text)
        check_spans(request.spans, session.pool.spec)
        self._context.scheduler.tell(StartPull(session.pool, request, ticket.decode(request.ticket)))

    def _check_open(self, session: _Session) -> None:
        if self._closing is not None:
            raise self._closing
        if session.backlogged:
            text = f"{limits.MAX_UNACKNOWLEDGED} notifications are unacknowledged; poll the client, then try again"
            raise Unavailable(ErrorCode.OVERLOADED, text)
        session.allowance.take_request()

    def _refuse(self, session: bytes, call: int, error: KvdError) -> None:
        self._context.metrics.refused.labels("worker", error.code).inc()
        sent = self._port.send(session, codec.encode(Error(call, error.code, error.text[: limits.MAX_ERROR_TEXT])))
        known = self._by_id.get(session)
        if not sent and known is not None:
            self._hang_up(known)

    def _hang_up(self, session: _Session) -> None:
        """An answer did not fit, and the worker would wait for it for ever: let it attach again and ask again."""
        self._port.close_session(session.connection)
        self.closed(SessionClosed(session.connection))

    # --- what others say to workers ---------------------------------------------------------------------------------

    @handles(Refusal)
    def refusal(self, message: Refusal) -> None:
        """Another actor refuses a request."""
        session = self._by_worker.get(message.worker)
        if session is not None:
            self._refuse(session.id, message.call, message.error)

    @handles(Answer)
    def answer(self, message: Answer) -> None:
        """Sends; a batch of notifications that does not fit is sent again later, another answer is not."""
        session = self._by_worker.get(message.worker)
        if session is None or self._port.send(session.id, codec.encode(message.message)):
            return
        if isinstance(message.message, Notifications):
            self._context.completion.tell(Undelivered(message.worker))
        else:
            self._hang_up(session)

    @handles(Backlog)
    def backlog(self, message: Backlog) -> None:
        """Stops or resumes new requests of one worker."""
        session = self._by_worker.get(message.worker)
        if session is not None:
            session.backlogged = message.full

    @handles(Reported)
    def reported(self, message: Reported) -> None:
        """One section of a status."""
        self._statuses.reported(message)

    # --- the end ----------------------------------------------------------------------------------------------------

    @handles(Drain)
    def drain(self, _message: Drain) -> None:
        """Nothing new from here on; what was accepted still gets its outcome."""
        self._closing = Unavailable(ErrorCode.SHUTTING_DOWN, "the daemon is stopping; send new requests elsewhere")

    @handles(Stop)
    def stop(self, _message: Stop) -> None:
        """Hangs up on every worker, after what was sent to it."""
        for connection in self._connections:
            self._port.close_session(connection)
        self._connections.clear()
