"""Statuses that are being collected: every actor reports its section, the last one completes it."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvd.actors.gateway.messages import Reported
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.messages import Report
from kvd.protocol.worker import Status

_SECTIONS = ("pools", "handshake", "leases", "scheduler", "completion")


@dataclass(slots=True)
class _Pending:
    answer: Callable[[Status], None]
    call: int
    sections: dict[str, object]


class Statuses:
    """`describe` gives what no actor reports: who the daemon is and whom it serves."""

    def __init__(self, context: ActorContext, describe: Callable[[], dict[str, object]]) -> None:
        self._context = context
        self._describe = describe
        self._pending: dict[int, _Pending] = {}
        self._last_token = 0

    def __len__(self) -> int:
        return len(self._pending)

    def ask(self, call: int, answer: Callable[[Status], None]) -> None:
        """Begins to collect one; `answer` gets it."""
        self._last_token += 1
        self._pending[self._last_token] = _Pending(answer, call, {})
        for section in _SECTIONS:
            getattr(self._context, section).tell(Report(self._last_token))

    def reported(self, message: Reported) -> None:
        """One section of one of them."""
        pending = self._pending.get(message.token)
        if pending is None:
            return
        pending.sections[message.section] = message.content
        if len(pending.sections) == len(_SECTIONS):
            del self._pending[message.token]
            document = self._describe() | pending.sections
            pending.answer(Status(pending.call, msgspec.json.encode(document)))
