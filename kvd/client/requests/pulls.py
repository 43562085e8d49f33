"""A worker's open pulls, and what ends them. Pure: events in, events out.

Promise 3, on this side of the socket: `quarantined=False` is reported only if the daemon said so or its process has
ended, and so writes nothing. Hence:

| pull is | what happens | event | and then |
|---|---|---|---|
| running | Done | Done | forgotten |
| running | Failed, Cancelled | the same | forgotten; waits for Freed if quarantined |
| running | Error (refused) | Failed, not quarantined | forgotten |
| running | the daemon is gone | Failed(DAEMON_LOST), not quarantined | forgotten |
| running | no outcome by its deadline and a grace | Failed(DEADLINE), quarantined | overdue |
| overdue | Done; Failed or Cancelled, not quarantined | Freed | forgotten |
| overdue | Failed or Cancelled, quarantined | | waits for Freed |
| overdue | Error (refused), or the daemon does not know it | Freed | forgotten |
| overdue, waits | Freed, or the daemon is gone | Freed | forgotten |

The end of a session fails nothing: the same daemon may be back in a moment, with the outcome.
"""

import math
from dataclasses import dataclass
from enum import Enum, auto

from kvd.client.events import Blocks, Cancelled, Done, Event, Failed, Freed
from kvd.errors import ErrorCode, refusal
from kvd.protocol import worker as wire

GRACE_SECONDS = 0.5
"""How long after a pull's deadline its outcome may come before it is given up (the daemon is stopped, overloaded)."""


class _State(Enum):
    RUNNING = auto()
    OVERDUE = auto()
    QUARANTINED = auto()


@dataclass(slots=True)
class _Pull:
    blocks: tuple[Blocks, ...]
    deadline: float
    state: _State = _State.RUNNING


class Pulls:
    """Every pull between its request and its last event."""

    def __init__(self) -> None:
        self._pulls: dict[str, _Pull] = {}
        self.next_expiry = math.inf
        """`expire` has nothing to do before this time."""

    def __contains__(self, request: str) -> bool:
        return request in self._pulls

    def __len__(self) -> int:
        return len(self._pulls)

    def add(self, request: str, blocks: tuple[Blocks, ...], deadline: float) -> None:
        """A pull was sent; `deadline` is on the caller's clock."""
        self._pulls[request] = _Pull(blocks, deadline)
        self.next_expiry = min(self.next_expiry, deadline + GRACE_SECONDS)

    def running(self, request: str) -> bool:
        """Whether its outcome was not reported yet."""
        pull = self._pulls.get(request)
        return pull is not None and pull.state is _State.RUNNING

    def overdue(self) -> list[str]:
        """Pulls that were given up here and that the daemon has not mentioned since."""
        return [request for request, pull in self._pulls.items() if pull.state is _State.OVERDUE]

    def notified(self, item: wire.Done | wire.Failed | wire.Cancelled | wire.Freed) -> list[Event]:
        """The daemon reported on a pull; ignored if the pull is not known (any more)."""
        pull = self._pulls.get(item.request)
        if pull is None:
            return []
        if pull.state is _State.RUNNING:
            return self._outcome(item, pull)
        if isinstance(item, wire.Failed | wire.Cancelled) and item.quarantined:
            pull.state = _State.QUARANTINED
            return []
        return self._free(item.request)

    def refused(self, request: str, code: str, text: str) -> list[Event]:
        """The daemon never accepted it."""
        if not self.running(request):
            return self._free(request)
        return [Failed(request, code, text, quarantined=False, blocks=self._pulls.pop(request).blocks)]

    def unknown(self, request: str) -> list[Event]:
        """The daemon has no such pull, and all its notifications about it have arrived."""
        return self._free(request) if request in self.overdue() else []

    def expire(self, now: float) -> list[Failed]:
        """Gives up pulls whose outcome is overdue."""
        events: list[Failed] = []
        self.next_expiry = math.inf
        for request, pull in self._pulls.items():
            if pull.state is not _State.RUNNING:
                continue
            if now < pull.deadline + GRACE_SECONDS:
                self.next_expiry = min(self.next_expiry, pull.deadline + GRACE_SECONDS)
            else:
                pull.state = _State.OVERDUE
                text = "the daemon did not say how the pull ended; its blocks may still be written to until `Freed`"
                events.append(Failed(request, ErrorCode.DEADLINE, text, quarantined=True, blocks=pull.blocks))
        return events

    def daemon_gone(self) -> list[Event]:
        """The daemon's process has ended, so nothing is written any more."""
        events: list[Event] = []
        for request in list(self._pulls):
            events += self.refused(request, ErrorCode.DAEMON_LOST, "the daemon died during the pull; try it again")
        return events

    def _outcome(self, item: wire.Done | wire.Failed | wire.Cancelled | wire.Freed, pull: _Pull) -> list[Event]:
        match item:
            case wire.Done(request):
                del self._pulls[request]
                return [Done(request)]
            case wire.Failed(request, code, text, quarantined):
                self._end(request, pull, quarantined=quarantined)
                return [Failed(request, code, text, quarantined, pull.blocks)]
            case wire.Cancelled(request, quarantined):
                self._end(request, pull, quarantined=quarantined)
                return [Cancelled(request, quarantined, pull.blocks)]
            case wire.Freed(request):
                raise refusal(ErrorCode.BAD_MESSAGE, f"the daemon freed the pull {request!r} before it ended it")

    def _end(self, request: str, pull: _Pull, *, quarantined: bool) -> None:
        if quarantined:
            pull.state = _State.QUARANTINED
        else:
            del self._pulls[request]

    def _free(self, request: str) -> list[Event]:
        pull = self._pulls.pop(request, None)
        return [] if pull is None else [Freed(request, pull.blocks)]
