"""Completion: keeps every notification until its worker has acknowledged it, and sends them in batches.

`Sessions` are the workers that have their pool: whatever is said to these goes through them.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from kvd import limits
from kvd.actors.runtime.actor import Actor
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.pools import Pool
from kvd.errors import KvdError
from kvd.net.interface import WorkerPort
from kvd.protocol.codec import encode
from kvd.protocol.status import LogStatus
from kvd.protocol.types import Message
from kvd.protocol.worker import Error, Notification, Notifications

_RESEND_AFTER = 0.05
"""Seconds after which a batch that a worker's full queue did not take is sent again."""


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
        message = Error(call, error.code, error.text, upcoming)
        sent = self._port.send(sender, encode(message))
        session = self._by_id.get(sender)
        if session is not None and not sent:
            self._hang_up(session.connection)

    def notify(self, worker: str, batch: Notifications) -> bool:
        """Sends notifications; False if the worker's queue is full: send them again later."""
        session = self._by_worker.get(worker)
        return session is None or self._port.send(session.id, encode(batch))


@dataclass(slots=True)
class _Log:
    """The notifications of one worker. `first` is the sequence number of the oldest that is kept."""

    worker: str
    tenancy: int
    first: int = 1
    items: deque[Notification] = field(default_factory=deque)
    sent: int = 0
    """How many of `items` were sent in this session, and not refused by the worker's full queue since."""
    told: int = 0
    """The highest sequence number that was ever sent: what may be acknowledged."""
    connected: bool = False
    flushing: bool = False
    """A `_flush` is to come."""


class CompletionActor(Actor):
    """A failure stops the daemon: a lost notification is a request without an end."""

    name = "completion"

    def __init__(self, context: ActorContext, sessions: Sessions) -> None:
        super().__init__(context.dispatcher)
        self._context = context
        self._sessions = sessions
        self._logs: dict[str, _Log] = {}
        context.metrics.unacknowledged.set_function(lambda: sum(len(log.items) for log in list(self._logs.values())))
        self._draining = False

    def notify(self, worker: str, item: Notification) -> None:
        """Keeps a notification and sends it: at once, or with those of what waits to be done."""
        log = self._logs.get(worker)
        if log is None:
            return  # the worker has detached: nobody waits for it
        log.items.append(item)
        if not log.flushing and self._dispatcher.idle:
            self._flush(log)
        elif not log.flushing:
            log.flushing = True
            self.call(self._flush, log)
        self.call(self._context.metrics.notifications.inc)  # not before it is sent

    def _flush(self, log: _Log) -> None:
        """Sends what has not been sent in this session."""
        log.flushing = False
        while log.connected and log.sent < len(log.items):
            batch = tuple(islice(log.items, log.sent, log.sent + limits.NOTIFICATIONS_PER_BATCH))
            start = log.first + log.sent
            if not self._sessions.notify(log.worker, Notifications(start, batch)):
                # The worker drops what it has: all that it has not acknowledged comes again.
                log.sent, log.flushing = 0, True
                self.later(_RESEND_AFTER, self._flush, log)
                return
            log.sent += len(batch)
            log.told = max(log.told, start + len(batch) - 1)

    def session_up(self, worker: str, tenancy: int) -> None:
        """A worker is connected, again or for the first time: it gets what it has not acknowledged.

        Its log starts empty if the pool had another `tenancy` before.
        """
        log = self._logs.get(worker)
        if log is None or log.tenancy != tenancy:
            self.forget(worker)
            log = self._logs[worker] = _Log(worker, tenancy)
        log.connected, log.sent = True, 0
        if not log.flushing:
            self._flush(log)

    def session_down(self, worker: str) -> None:
        """A worker is gone, perhaps for a moment: its log is kept."""
        log = self._logs.get(worker)
        if log is not None:
            log.connected = False
        self._check_idle()

    def acknowledged(self, worker: str, sequence: int) -> None:
        """Drops what the worker has: everything up to `sequence`."""
        log = self._logs.get(worker)
        if log is None:
            return
        for _ in range(min(sequence, log.told) - log.first + 1):
            log.items.popleft()
            log.first += 1
            log.sent = max(0, log.sent - 1)
        self._check_idle()

    def forget(self, worker: str) -> None:
        """The worker has detached or its pool has ended: nothing needs to be kept for it."""
        log = self._logs.pop(worker, None)
        if log is not None:
            log.connected = False  # a `_flush` may be to come
        self._check_idle()

    def drain(self) -> None:
        """No notification follows.

        Waits until each connected worker has acknowledged everything: the end of its socket could overtake it.
        """
        self._draining = True
        self._check_idle()

    def _check_idle(self) -> None:
        if self._draining and not any(log.connected and log.items for log in self._logs.values()):
            self._context.idle(self.name)

    def is_full(self, worker: str) -> bool:
        """Whether so many of a worker's notifications are unacknowledged that its new requests are refused."""
        log = self._logs.get(worker)
        return log is not None and len(log.items) >= limits.MAX_UNACKNOWLEDGED

    def upcoming(self, worker: str) -> int:
        """The sequence number of a worker's next notification; 0 if it has lost its pool, which it hears next."""
        log = self._logs.get(worker)
        return 0 if log is None else log.first + len(log.items)

    def report(self) -> dict[str, LogStatus]:
        """Notifications that are kept, by worker: its part of a status."""
        return {worker: LogStatus(len(log.items), self.upcoming(worker)) for worker, log in self._logs.items()}
