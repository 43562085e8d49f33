"""The processes on the session socket: they attach, detach, ask for a status, and go."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvd import limits
from kvd.actors.completion.actor import CompletionActor, Session, Sessions
from kvd.actors.gateway.admission import Admission
from kvd.actors.leases.actor import LeasesActor
from kvd.actors.pools.actor import PoolsActor
from kvd.actors.pools.requests import AttachPool, DetachPool, Lent
from kvd.actors.runtime.actor import Actor, Background, Component, call, run
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.deferred import Deadlines
from kvd.actors.runtime.specs import SpecReader
from kvd.actors.scheduler.actor import SchedulerActor
from kvd.errors import ErrorCode, KvdError, Unavailable, refusal
from kvd.layout import CacheSpec
from kvd.net.interface import ProcessEnded, SessionClosed, SessionFrame, SessionOpened, WorkerPort
from kvd.protocol import codec
from kvd.protocol.types import VERSION
from kvd.protocol.worker import Attach, Attached, Detach, Detached, End, Refused, Status


@dataclass(slots=True, eq=False)
class Connection:
    """A process on the session socket."""

    number: int
    pid: int
    uid: int
    gid: int
    watched: bool
    """Whether the socket tells when its process has ended."""
    ended: bool = False
    """Whether it has: another process may have inherited the connection."""
    worker: str = ""
    """The name it attaches under, empty if it has asked for no pool."""
    session: Session | None = None
    """Set while it has its pool."""
    detaching: bool = False
    """Whether it gives its pool back, which it may have mapped until that is done."""
    ending: bool = False
    """Whether it waits for the end of a pool that it does not have."""


class Connections(Component):
    """Closes those that have no pool and ask for nothing. `draw_session` draws 16 unguessable bytes."""

    def __init__(
        self,
        actor: Actor,
        context: ActorContext,
        port: WorkerPort,
        *,
        admission: Admission,
        sessions: Sessions,
        status: Callable[[int], Status],
        peer_address: Callable[[], str],
        draw_session: Callable[[], bytes],
        background: Background,
        pools: PoolsActor,
        scheduler: SchedulerActor,
        leases: LeasesActor,
        completion: CompletionActor,
    ) -> None:
        self.actor = actor
        self._context = context
        self._port = port
        self._admission = admission
        self._sessions = sessions
        self._status = status
        self._peer_address = peer_address
        self._draw_session = draw_session
        self._specs = SpecReader(background, actor)
        self._pools = pools
        self._scheduler = scheduler
        self._leases = leases
        self._completion = completion
        self._by_number: dict[int, Connection] = {}
        self._survivors: set[int] = set()
        """Closed ones whose process may live, and may have a pool."""
        self._idle: Deadlines[int] = Deadlines(
            context.loop, lambda number: actor.call(self._close_idle, number), for_others=True
        )
        """Those that have no pool and wait for none."""

    def opened(self, event: SessionOpened) -> None:
        """A process connected; the kernel says which user it is."""
        try:
            self._admission.enter(event.uid, event.connection)
        except Unavailable as full:
            self._refuse(event.connection, full)
            self._port.close_session(event.connection)
            self._port.forget_process(event.connection)
            return
        connection = Connection(event.connection, event.pid, event.uid, event.gid, event.watched)
        self._by_number[event.connection] = connection
        self._mark_idle(connection)

    def _mark_idle(self, connection: Connection) -> None:
        connection.worker = ""
        self._idle.set(connection.number, self._context.loop.time() + limits.SESSION_IDLE_SECONDS)

    def _close_idle(self, number: int) -> None:
        """Frees the place of a process that does not use it."""
        connection = self._by_number.get(number)
        if connection is None or connection.worker or connection.ending or number in self._idle:
            return  # it is gone, or has asked for something while this call waited
        text = f"nothing was asked for {limits.SESSION_IDLE_SECONDS:g} s; connect again when there is something"
        self._refuse(number, refusal(ErrorCode.DEADLINE, text))
        self.hang_up(number)

    def received(self, event: SessionFrame) -> None:
        """An attach, a detach, a status request, or garbage."""
        connection = self._by_number.get(event.connection)
        if connection is None:
            self._port.discard(event.descriptors)
            return
        try:
            request = codec.session_requests.decode(event.frame)
            if not (connection.worker or connection.ending):
                self._mark_idle(connection)
            if isinstance(request, Attach):
                self._attach(event, connection, request)
                return  # the pools actor closes its descriptor
            if isinstance(request, Detach):
                self._detach(connection)
            elif isinstance(request, End):
                self._end(connection, request.worker)
            else:
                self._request_status(request.call, connection)
        except KvdError as error:
            self._refuse(event.connection, error)
        self._port.discard(event.descriptors)

    def _attach(self, event: SessionFrame, connection: Connection, request: Attach) -> None:
        if request.version != VERSION:
            text = f"the daemon speaks version {VERSION} of the protocol, the worker {request.version}; use one release"
            raise refusal(ErrorCode.BAD_VERSION, text)
        self._admission.check_open()
        if connection.worker:
            raise refusal(ErrorCode.WRONG_STATE, f"this session is attached as {connection.worker!r} already")
        self._check_waits(connection)
        if len(event.descriptors) > 1:
            text = f"{len(event.descriptors)} descriptors came with the request; send at most one"
            raise refusal(ErrorCode.BAD_MESSAGE, text)
        quota = self._admission.admit(connection.uid, connection.gid, request.worker)
        connection.worker = request.worker
        self._idle.unset(connection.number)
        then = partial(self._spec_read, event, request, quota)
        self._specs.read(connection.number, str(connection.uid), request.spec, then)

    def _spec_read(self, event: SessionFrame, request: Attach, quota: int | None, spec: CacheSpec | KvdError) -> None:
        connection = self._by_number.get(event.connection)
        if connection is None:
            self._port.discard(event.descriptors)
        elif isinstance(spec, KvdError):
            self._port.discard(event.descriptors)
            self._mark_idle(connection)
            self._refuse(event.connection, spec)
        else:
            wanted = AttachPool(
                connection=event.connection,
                worker=request.worker,
                instance=request.instance,
                pid=connection.pid,
                watched=connection.watched,
                uid=connection.uid,
                spec=spec,
                raw_spec=request.spec,
                descriptor=event.descriptors[0] if event.descriptors else -1,
                quota=quota,
            )
            call(self._pools.attach, wanted)

    def _detach(self, connection: Connection) -> None:
        if connection.session is None:
            raise refusal(ErrorCode.NOT_ATTACHED, "this session has no pool; attach first")
        self._end_session(connection, connection.session)
        run(self._completion.forget, connection.worker)
        connection.detaching = True
        call(self._pools.detach, DetachPool(connection.number, connection.worker))

    def _end(self, connection: Connection, worker: str) -> None:
        """An operator has a pool ended; what comes of it is `pool_returned` or `attach_refused`."""
        if connection.worker:
            raise refusal(ErrorCode.WRONG_STATE, f"this session is attached as {connection.worker!r}: detach that")
        self._check_waits(connection)
        uid = self._admission.ends_for(connection.uid)
        connection.ending = True
        self._idle.unset(connection.number)
        call(self._pools.end, DetachPool(connection.number, worker), uid)

    @staticmethod
    def _check_waits(connection: Connection) -> None:
        """Checks that the next answer on a session without a pool is that to what it asks for now."""
        if connection.ending:
            raise refusal(ErrorCode.WRONG_STATE, "this session waits for a pool to end; wait, or open another one")

    def _request_status(self, request: int, connection: Connection) -> None:
        if connection.worker:
            self._admission.take_status(connection.uid, connection.number)
        else:
            self._admission.inquire(connection.uid)
        self._port.send_session(connection.number, codec.encode(self._status(request)))

    def pool_lent(self, lent: Lent) -> None:
        """The pool is ready: its worker gets it, its session, and the notifications that it has not acknowledged."""
        connection, worker = self._by_number.get(lent.connection), lent.pool.name
        if connection is None:
            call(self._pools.worker_gone, worker, lent.connection)
            return
        session = Session(self._draw_session(), connection.number, connection.pid, connection.uid, lent.pool)
        connection.session = session
        self._sessions.add(session)
        settings, memory = self._context.settings, lent.memory
        attached = Attached(
            session=session.id,
            endpoint=self._port.endpoint,
            daemon=settings.daemon,
            incarnation=settings.incarnation,
            address=self._peer_address(),
            pool_bytes=lent.pool.size,
            backing=memory.backing,
            device=memory.device,
            pool_length=memory.length,
            kept=lent.kept,
            tenancy=lent.tenancy,
        )
        self._port.send_session(connection.number, codec.encode(attached), (memory.descriptor,))
        run(self._completion.session_up, worker, lent.tenancy)

    def _end_session(self, connection: Connection, session: Session) -> None:
        connection.session = None
        self._sessions.remove(session)
        run(self._completion.session_down, session.pool.name)
        run(self._scheduler.worker_left, session.pool.name)
        run(self._leases.offers.end_growing, session.pool.name)

    def pool_returned(self, number: int) -> None:
        """A detach is complete."""
        connection = self._by_number.get(number)
        if connection is not None:
            connection.detaching = connection.ending = False
            self._mark_idle(connection)
            self._port.send_session(number, codec.encode(Detached()))

    def attach_refused(self, number: int, error: KvdError) -> None:
        """An attach or detach cannot be served. A worker that has lost its pool attaches again and is told why then."""
        connection = self._by_number.get(number)
        if connection is None:
            return
        connection.ending = False
        if connection.detaching:
            self._refuse(number, error)
            self.hang_up(number)  # its process is watched on
        elif connection.session is not None:
            self.hang_up(number)
        else:
            self._mark_idle(connection)
            self._refuse(number, error)

    def hang_up(self, number: int) -> None:
        """Closes a connection after what was sent on it; its worker connects and attaches again."""
        if number in self._by_number:
            self._port.close_session(number)
            self.closed(SessionClosed(number))

    def closed(self, event: SessionClosed) -> None:
        """A process is gone, or only its session is. Its pool and its transfers are not."""
        connection = self._by_number.pop(event.connection, None)
        if connection is None:
            return
        self._admission.leave(connection.uid, connection.number)
        self._specs.forget(event.connection)
        self._idle.unset(event.connection)
        if connection.session is not None:
            self._end_session(connection, connection.session)
        if not connection.worker:
            self._port.forget_process(event.connection)
            return
        call(self._pools.worker_gone, connection.worker, event.connection)
        if connection.ended:
            call(self._pools.worker_ended, event.connection)
        elif connection.watched:
            self._survivors.add(event.connection)

    def process_ended(self, event: ProcessEnded) -> None:
        """A process has ended; whoever inherited its session counts as the same worker until that is closed, too."""
        connection = self._by_number.get(event.connection)
        if connection is not None:
            connection.ended = True
        elif event.connection in self._survivors:
            self._survivors.remove(event.connection)
            call(self._pools.worker_ended, event.connection)

    def process_released(self, number: int) -> None:
        """Watches a process no more, unless its session is open: it may attach again."""
        if number in self._survivors:
            self._survivors.remove(number)
            self._port.forget_process(number)

    def close_all(self) -> None:
        """Hangs up on every worker, after what was sent to it: the daemon ends."""
        for number in self._by_number:
            self._port.close_session(number)
        self._by_number.clear()

    def _refuse(self, number: int, error: KvdError) -> None:
        self._context.metrics.refused.labels("session", error.code).inc()
        refused = Refused(error.code, error.text)
        self._port.send_session(number, codec.encode(refused))
