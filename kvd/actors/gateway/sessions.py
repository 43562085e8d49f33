"""The workers that have their pool, and what is said to them."""

from collections.abc import Callable
from dataclasses import dataclass

from kvd import limits
from kvd.actors.completion.messages import SessionDown, SessionUp
from kvd.actors.gateway.admission import Allowance
from kvd.actors.gateway.messages import Backlog, PoolLent, PoolRenewed
from kvd.actors.runtime.actor import Component, handles
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.messages import Pool
from kvd.actors.scheduler.messages import EndHolds
from kvd.errors import KvdError
from kvd.net.interface import WorkerPort
from kvd.protocol.codec import encode
from kvd.protocol.types import Message
from kvd.protocol.worker import Attached, Error, Notifications


@dataclass(slots=True, eq=False)
class Connection:
    """A process on the session socket."""

    number: int
    pid: int
    uid: int
    gid: int
    watched: bool
    """Whether the socket tells when its process has ended."""
    allowance: Allowance
    ended: bool = False
    """Whether it has: another process may have inherited the connection."""
    worker: str = ""
    """The name it attaches under, empty if it has asked for no pool."""
    session: "Session | None" = None
    """Set while it has its pool."""
    detaching: bool = False
    """Whether it gives its pool back, which it may have mapped until that is done."""
    ending: bool = False
    """Whether it waits for the end of a pool that it does not have."""


@dataclass(slots=True, eq=False)
class Session:
    """A worker that has its pool."""

    id: bytes
    """The routing id of its requests."""
    connection: Connection
    pool: Pool
    backlogged: bool = False


class Sessions(Component):
    """The `WorkerReplies` of all actors."""

    def __init__(
        self,
        context: ActorContext,
        port: WorkerPort,
        *,
        peer_address: Callable[[], str],
        draw_id: Callable[[], bytes],
        hang_up: Callable[[Connection], None],
    ) -> None:
        self._context = context
        self._port = port
        self._peer_address = peer_address
        self._draw_id = draw_id
        self._hang_up = hang_up
        self._by_worker: dict[str, Session] = {}
        self._by_id: dict[bytes, Session] = {}

    @property
    def workers(self) -> list[str]:
        """Their names."""
        return sorted(self._by_worker)

    @property
    def pids(self) -> dict[str, int]:
        """Their processes, in this PID namespace; 0 for one outside of it."""
        return {worker: session.connection.pid for worker, session in self._by_worker.items()}

    def find(self, sender: bytes) -> Session | None:
        """The session with the routing id `sender`."""
        return self._by_id.get(sender)

    def begin(self, connection: Connection, lent: PoolLent) -> None:
        """Gives the worker its pool, its session, and the notifications that it has not acknowledged."""
        session = connection.session = Session(self._draw_id(), connection, lent.pool)
        self._by_worker[lent.pool.worker] = self._by_id[session.id] = session
        self._context.metrics.workers.set(len(self._by_worker))
        settings = self._context.settings
        attached = Attached(
            session=session.id,
            endpoint=self._port.endpoint,
            daemon=settings.daemon,
            incarnation=settings.incarnation,
            address=self._peer_address(),
            pool_bytes=lent.pool.size,
            backing=lent.backing,
            device=lent.device,
            pool_length=lent.length,
            kept=lent.kept,
            pool=lent.tenancy,
        )
        self._port.send_session(connection.number, encode(attached), (lent.descriptor,))
        self._context.completion.tell(SessionUp(lent.pool.worker, lent.tenancy))

    def end(self, session: Session) -> None:
        """Nothing more is taken from the worker or sent to it."""
        session.connection.session = None
        del self._by_worker[session.pool.worker], self._by_id[session.id]
        self._context.metrics.workers.set(len(self._by_worker))
        self._context.completion.tell(SessionDown(session.pool.worker))
        self._context.scheduler.tell(EndHolds(session.pool.worker))

    @handles(PoolRenewed)
    def pool_renewed(self, message: PoolRenewed) -> None:
        """New requests are about the new epoch."""
        session = self._by_worker.get(message.pool.worker)
        if session is not None:
            session.pool = message.pool

    @handles(Backlog)
    def backlog(self, message: Backlog) -> None:
        """Stops or resumes new requests of one worker."""
        session = self._by_worker.get(message.worker)
        if session is not None:
            session.backlogged = message.full

    # --- what is said to workers ------------------------------------------------------------------------------------

    def answer(self, worker: str, message: Message) -> None:
        """See `WorkerReplies`."""
        session = self._by_worker.get(worker)
        if session is not None and not self._port.send(session.id, encode(message)):
            self._hang_up(session.connection)

    def refuse(self, worker: str, call: int, error: KvdError) -> None:
        """See `WorkerReplies`."""
        session = self._by_worker.get(worker)
        if session is not None:
            self.refuse_frame(session.id, call, error)

    def notify(self, worker: str, batch: Notifications) -> bool:
        """See `WorkerReplies`."""
        session = self._by_worker.get(worker)
        return session is None or self._port.send(session.id, encode(batch))

    def refuse_frame(self, sender: bytes, call: int, error: KvdError) -> None:
        """Refuses what came under the routing id `sender`, which may be no session's."""
        self._context.metrics.refused.labels("worker", error.code).inc()
        sent = self._port.send(sender, encode(Error(call, error.code, error.text[: limits.MAX_ERROR_TEXT])))
        session = self._by_id.get(sender)
        if session is not None and not sent:
            self._hang_up(session.connection)
