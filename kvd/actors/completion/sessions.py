"""The workers that have their pool, and what is said to them."""

from collections.abc import Callable
from dataclasses import dataclass

from kvd import limits
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.pools import Pool
from kvd.errors import KvdError
from kvd.net.interface import WorkerPort
from kvd.protocol.codec import encode
from kvd.protocol.types import Message
from kvd.protocol.worker import Error, Notifications


@dataclass(slots=True, eq=False)
class Session:
    """A worker that has its pool."""

    id: bytes
    """The routing id of its requests."""
    connection: int
    pid: int
    """Its process, in this PID namespace; 0 for one outside of it."""
    uid: int
    pool: Pool
    backlogged: bool = False
    """Whether so many of its notifications are unacknowledged that its new requests are refused."""


class Sessions:
    """Sends to attached workers by name; what is for a worker without a session is dropped.

    `hang_up` is called with the connection of a worker whose queue is full: it would wait for the answer forever.
    """

    def __init__(self, context: ActorContext, port: WorkerPort, hang_up: Callable[[int], None]) -> None:
        self._metrics = context.metrics
        self._port = port
        self._hang_up = hang_up
        self._by_worker: dict[str, Session] = {}
        self._by_id: dict[bytes, Session] = {}

    @property
    def workers(self) -> list[str]:
        """Their names."""
        return sorted(self._by_worker)

    @property
    def pids(self) -> dict[str, int]:
        """Their processes, as `Session.pid`."""
        return {worker: session.pid for worker, session in self._by_worker.items()}

    def find(self, sender: bytes) -> Session | None:
        """The session with the routing id `sender`."""
        return self._by_id.get(sender)

    def add(self, session: Session) -> None:
        """From now on requests are taken from the worker, and things are sent to it."""
        self._by_worker[session.pool.name] = self._by_id[session.id] = session
        self._metrics.workers.set(len(self._by_worker))

    def remove(self, session: Session) -> None:
        """Nothing more is taken from the worker or sent to it."""
        del self._by_worker[session.pool.name], self._by_id[session.id]
        self._metrics.workers.set(len(self._by_worker))

    def renew(self, pool: Pool) -> None:
        """A worker's pool was registered anew: new requests are about its new epoch."""
        session = self._by_worker.get(pool.name)
        if session is not None:
            session.pool = pool

    def set_backlogged(self, worker: str, *, backlogged: bool) -> None:
        """Stops or resumes new requests of one worker."""
        session = self._by_worker.get(worker)
        if session is not None:
            session.backlogged = backlogged

    def answer(self, worker: str, message: Message) -> None:
        """Answers a request."""
        session = self._by_worker.get(worker)
        if session is not None and not self._port.send(session.id, encode(message)):
            self._hang_up(session.connection)

    def refuse(self, worker: str, call: int, error: KvdError, upcoming: int = 0) -> None:
        """Refuses the request `call`; nothing has changed. `upcoming` is that of `Error`."""
        session = self._by_worker.get(worker)
        if session is not None:
            self.refuse_frame(session.id, call, error, upcoming)

    def refuse_frame(self, sender: bytes, call: int, error: KvdError, upcoming: int = 0) -> None:
        """Refuses what came under the routing id `sender`, which may be no session's."""
        self._metrics.refused.labels("worker", error.code).inc()
        message = Error(call, error.code, error.text[: limits.MAX_ERROR_TEXT], upcoming)
        sent = self._port.send(sender, encode(message))
        session = self._by_id.get(sender)
        if session is not None and not sent:
            self._hang_up(session.connection)

    def notify(self, worker: str, batch: Notifications) -> bool:
        """Sends notifications; False if the worker's queue is full: send them again later."""
        session = self._by_worker.get(worker)
        return session is None or self._port.send(session.id, encode(batch))
