"""Collects statuses: each actor reports its section, and the last one completes it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvd.actors.gateway.messages import Reported
from kvd.actors.runtime.actor import Actor, Component, handles
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.messages import Report
from kvd.protocol.worker import Status


@dataclass(slots=True)
class _Pending:
    call: int
    answer: Callable[[Status], None]
    sections: dict[str, object] = field(default_factory=dict)


class Statuses(Component):
    """`describe` gives what no actor reports: which daemon it is and which workers are attached."""

    def __init__(self, context: ActorContext, describe: Callable[[], dict[str, object]]) -> None:
        self._context = context
        self._describe = describe
        self._pending: dict[int, _Pending] = {}
        self._last_token = 0

    def request(self, call: int, answer: Callable[[Status], None]) -> None:
        """Collects a status and calls `answer` with it."""
        self._last_token += 1
        self._pending[self._last_token] = _Pending(call, answer)
        for actor in self._reporters():
            actor.tell(Report(self._last_token))

    def _reporters(self) -> list[Actor]:
        return [actor for actor in self._context.actors if actor is not self._context.gateway]

    @handles(Reported)
    def reported(self, message: Reported) -> None:
        """One section of a status."""
        pending = self._pending[message.token]
        pending.sections[message.section] = message.content
        if len(pending.sections) == len(self._reporters()):
            del self._pending[message.token]
            document = self._describe() | pending.sections
            pending.answer(Status(pending.call, msgspec.json.encode(document)))
