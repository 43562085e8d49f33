"""Completion: keeps every notification until its worker has acknowledged it, and sends them in batches."""

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from kvd import limits
from kvd.actors.completion.sessions import Sessions
from kvd.actors.runtime.actor import Actor
from kvd.actors.runtime.context import ActorContext
from kvd.protocol.status import LogStatus
from kvd.protocol.worker import Notification, Notifications

_RESEND_AFTER = 0.05
"""Seconds after which a batch that a worker's full queue did not take is sent again."""


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
    full: bool = False


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
        """Keeps a notification and sends it, together with those that come right behind it."""
        log = self._logs.get(worker)
        if log is None:
            return  # the worker has detached: nobody waits for it
        log.items.append(item)
        self._set_full(log)
        if not log.flushing:
            log.flushing = True
            self.call(self._flush, log)
        self.call(self._context.metrics.notifications.inc)  # not before it is sent

    def _set_full(self, log: _Log) -> None:
        full = len(log.items) >= limits.MAX_UNACKNOWLEDGED
        if full != log.full:
            log.full = full
            self._sessions.set_backlogged(log.worker, backlogged=full)

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
        if log.full:
            self._sessions.set_backlogged(worker, backlogged=True)
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
        self._set_full(log)
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

    def upcoming(self, worker: str) -> int:
        """The sequence number of a worker's next notification; 0 if it has lost its pool, which it hears next."""
        log = self._logs.get(worker)
        return 0 if log is None else log.first + len(log.items)

    def report(self) -> dict[str, LogStatus]:
        """Notifications that are kept, by worker: its part of a status."""
        return {worker: LogStatus(len(log.items), self.upcoming(worker)) for worker, log in self._logs.items()}
