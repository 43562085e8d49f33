"""Completion: keeps every notification until its worker has acknowledged it, and sends them in batches."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from msgspec import Struct

from kvd import limits
from kvd.actors.completion.messages import Acknowledged, Forget, Notify, SessionDown, SessionUp, Undelivered
from kvd.actors.gateway.messages import Answer, Backlog, Reported
from kvd.actors.runtime.actor import Actor, handles
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.messages import Drain, Report
from kvd.protocol.worker import Notification, Notifications

_RESEND_AFTER = 0.05
"""Seconds after which a batch that a worker's full queue did not take is sent again."""


@dataclass(slots=True)
class _Log:
    """The notifications of one worker. `first` is the sequence number of the oldest that is kept."""

    tenancy: int
    first: int = 1
    items: deque[Notification] = field(default_factory=deque)
    sent: int = 0
    """How many of `items` were sent in this session, and not refused by the worker's full queue since."""
    told: int = 0
    """The highest sequence number that was ever sent: what may be acknowledged."""
    connected: bool = False
    flushing: bool = False
    full: bool = False


class _Flush(Struct, frozen=True, gc=False):
    worker: str


class CompletionActor(Actor):
    """See the module's text. A failure stops the daemon: a lost notification is a request without an end."""

    name = "completion"

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context.dispatcher)
        self._context = context
        self._logs: dict[str, _Log] = {}
        context.metrics.unacknowledged.set_function(lambda: sum(len(log.items) for log in list(self._logs.values())))
        self._draining = False

    @handles(Notify)
    def notify(self, message: Notify) -> None:
        """Keeps a notification; it goes out with all others of this turn of the loop."""
        log = self._logs.get(message.worker)
        if log is None:
            return  # the worker has detached: nobody waits for it
        log.items.append(message.item)
        self.loop.call_soon(self._context.metrics.notifications.inc)  # nobody waits for it
        self._set_full(message.worker, log)
        self._flush_soon(message.worker, log)

    def _set_full(self, worker: str, log: _Log) -> None:
        full = len(log.items) >= limits.MAX_UNACKNOWLEDGED
        if full != log.full:
            log.full = full
            self._context.gateway.tell(Backlog(worker, full))

    def _flush_soon(self, worker: str, log: _Log) -> None:
        if log.connected and not log.flushing:
            log.flushing = True
            self.tell(_Flush(worker))

    @handles(_Flush)
    def flush(self, message: _Flush) -> None:
        """Sends what has not been sent in this session."""
        log = self._logs.get(message.worker)
        if log is None:
            return
        log.flushing = False
        if not log.connected:
            return
        for batch in _batches(log):
            self._context.gateway.tell(Answer(message.worker, batch))
        log.sent = len(log.items)
        log.told = log.first + log.sent - 1

    @handles(Undelivered)
    def undelivered(self, message: Undelivered) -> None:
        """The worker does not read: everything that is not acknowledged is sent again later (it drops what it has)."""
        log = self._logs.get(message.worker)
        if log is None:
            return
        log.sent = 0
        if not log.flushing:
            log.flushing = True
            self.tell_later(_RESEND_AFTER, _Flush(message.worker))

    @handles(SessionUp)
    def session_up(self, message: SessionUp) -> None:
        """A worker is there, again or for the first time: it gets what it has not acknowledged."""
        log = self._logs.get(message.worker)
        if log is None or log.tenancy != message.tenancy:
            self.forget(Forget(message.worker))
            log = self._logs[message.worker] = _Log(message.tenancy)
        log.connected, log.sent = True, 0
        if log.full:
            self._context.gateway.tell(Backlog(message.worker, full=True))
        if log.items:
            self._flush_soon(message.worker, log)

    @handles(SessionDown)
    def session_down(self, message: SessionDown) -> None:
        """A worker is gone, perhaps for a moment: its log is kept."""
        log = self._logs.get(message.worker)
        if log is not None:
            log.connected = False
        self._check_idle()

    @handles(Acknowledged)
    def acknowledged(self, message: Acknowledged) -> None:
        """Drops what the worker has."""
        log = self._logs.get(message.worker)
        if log is None:
            return
        for _ in range(min(message.sequence, log.told) - log.first + 1):
            log.items.popleft()
            log.first += 1
            log.sent = max(0, log.sent - 1)
        self._set_full(message.worker, log)
        self._check_idle()

    @handles(Forget)
    def forget(self, message: Forget) -> None:
        """The worker will not come back for its notifications."""
        self._logs.pop(message.worker, None)
        self._check_idle()

    @handles(Drain)
    def drain(self, _message: Drain) -> None:
        """Says when every worker that is there has acknowledged what it was told: a socket's end may overtake it."""
        self._draining = True
        self._check_idle()

    def _check_idle(self) -> None:
        if self._draining and not any(log.connected and log.items for log in self._logs.values()):
            self._context.idle(self.name)

    @handles(Report)
    def report(self, message: Report) -> None:
        """Notifications that are kept, by worker."""
        content = {
            worker: {"next": log.first + len(log.items), "kept": len(log.items)} for worker, log in self._logs.items()
        }
        self._context.gateway.tell(Reported(message.token, self.name, content))


def _batches(log: _Log) -> Iterator[Notifications]:
    items = list(islice(log.items, log.sent, None))
    for start in range(0, len(items), limits.NOTIFICATIONS_PER_BATCH):
        batch = items[start : start + limits.NOTIFICATIONS_PER_BATCH]
        yield Notifications(log.first + log.sent + start, tuple(batch))
