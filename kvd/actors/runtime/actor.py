"""Mailbox actors: an actor owns its state, takes messages, and sends messages to others. It never waits for an answer.

Methods marked `@handles(Kind)`, of the actor or of a component that it owns, take one message each and return quickly.
Messages of one sender arrive in order. Since no actor waits, no cycle of actors can deadlock. Sockets are read no
faster than messages are handled (`Dispatcher.admits`), so a mailbox that overflows is a bug, and counts as a failure.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from kvd import limits
from kvd.actors.runtime.loop import Loop, Timer
from kvd.errors import ErrorCode, refusal

A = TypeVar("A")


class OnFailure(Enum):
    """What the supervisor does when a handler raises."""

    RESUME = "resume"
    """Go on with the next message: for actors whose state one message cannot spoil."""
    STOP = "stop"
    """Stop the daemon: the state may be wrong, and a restart costs only the requests in flight."""


class Supervisor(Protocol):
    """Hears of handlers that raised."""

    def failed(self, actor: "Actor", message: object, error: Exception) -> None:
        """Reports `error` and acts by `actor.on_failure`."""


@dataclass(frozen=True, slots=True)
class Probe:
    """To any actor: call `answer` with your name, which shows that your mailbox is handled."""

    answer: Callable[[str], None]


def handles(kind: type) -> Callable[[A], A]:
    """Marks a method as the handler of messages of `kind`."""

    def mark(method: A) -> A:
        method.__handles__ = kind  # type: ignore[attr-defined]
        return method

    return mark


class Call(NamedTuple):
    """To an actor itself: call this method."""

    method: Callable[..., None]
    arguments: tuple[Any, ...]


class Component:
    """Owns a part of an actor's state and handles the messages about it, once it is passed to `Actor.serve`."""

    handled: ClassVar[dict[type, str]] = {}
    """The name of the handler of each kind of message."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        methods = ((name, method) for klass in reversed(cls.__mro__) for name, method in vars(klass).items())
        cls.handled = {method.__handles__: name for name, method in methods if hasattr(method, "__handles__")}


class Dispatcher:
    """Delivers the messages between the actors of one daemon: one callback of the loop for a whole chain of them.

    A callback for each message would cost a turn of the loop, with its system calls, for each step of a request. It is
    also the `kvd.net.interface.Intake` of the daemon's sockets.
    """

    def __init__(self, loop: Loop, supervisor: Supervisor) -> None:
        self.loop = loop
        self._supervisor = supervisor
        self._queue: deque[tuple[Actor, object]] = deque()
        self._called = False
        self._held: dict[Callable[[], None], None] = {}
        """Readers of sockets that go on when few enough messages wait, the first to wait first."""
        self._full = False
        self._resuming = False

    def admits(self, again: Callable[[], None]) -> bool:
        """Whether a socket may take in one more frame; if not, `again` is called on the loop once it may."""
        self._full = self._full or len(self._queue) >= limits.INTAKE_CLOSES
        if self._full or (self._held and not self._resuming):
            self._held[again] = None
            return False
        return True

    def _resume(self) -> None:
        """Lets the reader that has waited longest go on; new ones queue behind the others."""
        if self._full or not self._held:
            return
        again = next(iter(self._held))
        del self._held[again]
        self.loop.call_soon(self._resume)
        self._resuming = True
        try:
            again()
        finally:
            self._resuming = False

    def put(self, actor: "Actor", message: object) -> None:
        """Queues `message` for `actor`."""
        self._queue.append((actor, message))
        if not self._called:
            self._called = True
            self.loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        """Delivers messages in order; after a bounded number sockets and timers get their turn."""
        try:
            self._deliver_some()
        finally:  # even if a failure could not be reported: the messages behind it are not to blame
            if self._full and len(self._queue) <= limits.INTAKE_OPENS:
                self._full = False
                self.loop.call_soon(self._resume)
            if self._called:
                self.loop.call_soon(self._deliver)

    def _deliver_some(self) -> None:
        for _ in range(limits.MESSAGES_PER_TURN):
            if not self._queue:
                self._called = False
                break
            actor, message = self._queue.popleft()
            actor.waiting -= 1
            try:
                actor.handlers[type(message)](message)
            except Exception as error:  # noqa: BLE001 - the supervisor decides; nothing is swallowed
                self._supervisor.failed(actor, message, error)


class Actor(Component):
    """Base of all actors; see the module's text."""

    name: ClassVar[str]
    on_failure: ClassVar[OnFailure] = OnFailure.STOP

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.loop = dispatcher.loop
        self.waiting = 0
        """Messages in its mailbox."""
        self.handlers: dict[type, Callable[[Any], None]] = {}
        self._dispatcher = dispatcher
        self.serve(self)

    def serve(self, component: Component) -> None:
        """Has `component` handle its kinds of messages from now on."""
        self.handlers |= {kind: getattr(component, name) for kind, name in component.handled.items()}

    def tell(self, message: object) -> None:
        """Puts `message` in the mailbox; it is handled after the current one.

        Raises:
            InternalError: the mailbox is full.

        """
        if self.waiting >= limits.MAILBOX_MESSAGES:
            raise refusal(ErrorCode.INTERNAL, f"the mailbox of {self.name} is full ({self.waiting} messages)")
        self.waiting += 1
        self._dispatcher.put(self, message)

    def soon(self, method: Callable[..., None], *arguments: object) -> None:
        """Calls `method(*arguments)` as a message to itself: after those that wait, and supervised."""
        self.tell(Call(method, arguments))

    def later(self, delay: float, method: Callable[..., None], *arguments: object) -> Timer:
        """Like `soon`, in `delay` seconds."""
        return self.loop.call_later(delay, self.soon, method, *arguments)

    @handles(Call)
    def _call(self, call: Call) -> None:
        call.method(*call.arguments)

    @handles(Probe)
    def probe(self, message: Probe) -> None:
        """Answers that messages are handled."""
        message.answer(self.name)
