"""Actors: each owns its state, and none ever waits for an answer, so no cycle of actors can deadlock.

An actor may call those below it (`kvd.actors.build`) like any object. What comes from below or from outside waits:
`call(method, ...)` puts a call of a method into the mailbox of the actor that the method belongs to, so that no actor
is called in the middle of its own turn. Such calls are made in the order in which they were put there, by whomever.
Sockets are read no faster than that (`Dispatcher.admits`), so a mailbox that overflows is a bug, and counts as a
failure.
"""

from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, ClassVar, ParamSpec, Protocol, TypeVar

from kvd import limits
from kvd.errors import ErrorCode, KvdError, refusal

T = TypeVar("T")


class Timer(Protocol):
    """A callback that is due later."""

    def cancel(self) -> None:
        """Drops the callback."""


class Loop(Protocol):
    """A monotonic clock, and callbacks in the order in which they were asked for."""

    def time(self) -> float:
        """Seconds since an arbitrary moment."""

    def call_soon(self, callback: Callable[..., object], *args: Any) -> Any:
        """Calls back after the current callback, in order."""

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Timer:
        """Calls back `delay` seconds from now."""


class Background(Protocol):
    """Runs work that would block the loop for long (faulting in gigabytes, reading a large spec) in another thread."""

    def __call__(self, work: Callable[[], T], done: Callable[[T | KvdError], None]) -> None:
        """Calls `work` in a thread, then `done` on the loop with what it returned or raised."""


P = ParamSpec("P")


class OnFailure(Enum):
    """What the supervisor does when a call raises."""

    RESUME = "resume"
    """Go on with the next call: for actors whose state one call cannot spoil."""
    STOP = "stop"
    """Stop the daemon: the state may be wrong, and a restart costs only the requests in flight."""


class Supervisor(Protocol):
    """Hears of calls that raised."""

    def failed(self, actor: "Actor", method: str, error: Exception) -> None:
        """Reports `error` and acts by `actor.on_failure`."""


class Component:
    """A part of an actor, which owns a part of its state: calls of its methods wait in the mailbox of `actor`."""

    actor: "Actor"


def call(method: Callable[P, None], *arguments: P.args, **named: P.kwargs) -> None:
    """Has a method of an actor, or of a component of one, called: supervised, and behind what waits already.

    Raises:
        InternalError: the actor's mailbox is full.

    """
    owner: Component = method.__self__  # type: ignore[attr-defined] # ParamSpec cannot ask for a bound method
    owner.actor.call(method, *arguments, **named)


def run(method: Callable[P, None], *arguments: P.args, **named: P.kwargs) -> None:
    """Calls a method of an actor below, or of a component of one, at once; if it raises, that actor has failed.

    For actors that go on after a failure: their own would hide that of an actor which must not.
    """
    owner: Component = method.__self__  # type: ignore[attr-defined] # as above
    try:
        method(*arguments, **named)
    except Exception as error:  # noqa: BLE001 - as in the dispatcher
        owner.actor.has_failed(method, error)


class Dispatcher:
    """Makes the calls of all actors of one daemon: one callback of the loop for a whole chain of them.

    A callback for each call would cost a turn of the loop, with its system calls, for each step of a request. It is
    also the `kvd.net.interface.Intake` of the daemon's sockets.
    """

    def __init__(self, loop: Loop, supervisor: Supervisor) -> None:
        self.loop = loop
        self.supervisor = supervisor
        self._queue: deque[tuple[Actor, Callable[..., None], tuple[Any, ...]]] = deque()
        self._called = False
        self._held: dict[Callable[[], None], None] = {}
        """Readers of sockets that go on when few enough calls wait, the first to wait first."""
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

    @property
    def idle(self) -> bool:
        """Whether no call waits."""
        return not self._queue

    def put(self, actor: "Actor", method: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Queues a call of `actor`."""
        self._queue.append((actor, method, arguments))
        if not self._called:
            self._called = True
            self.loop.call_soon(self._run)

    def _run(self) -> None:
        """Makes calls in order; after a bounded number sockets and timers get their turn."""
        try:
            self._run_some()
        finally:  # even if a failure could not be reported: the calls behind it are not to blame
            if self._full and len(self._queue) <= limits.INTAKE_OPENS:
                self._full = False
                self.loop.call_soon(self._resume)
            if self._called:
                self.loop.call_soon(self._run)

    def _run_some(self) -> None:
        for _ in range(limits.MESSAGES_PER_TURN):
            if not self._queue:
                self._called = False
                break
            actor, method, arguments = self._queue.popleft()
            actor.waiting -= 1
            try:
                method(*arguments)
            except Exception as error:  # noqa: BLE001 - the supervisor decides; nothing is swallowed
                actor.has_failed(method, error)


def name_of(method: Callable[..., None]) -> str:
    """The name of a method that was called, for people."""
    return str(getattr(method.func if isinstance(method, partial) else method, "__name__", type(method).__name__))


class Actor(Component):
    """Base of all actors; see the module's text."""

    name: ClassVar[str]
    on_failure: ClassVar[OnFailure] = OnFailure.STOP

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.actor = self
        self.loop = dispatcher.loop
        self.waiting = 0
        """Calls in its mailbox."""
        self._dispatcher = dispatcher

    def call(self, method: Callable[P, None], *arguments: P.args, **named: P.kwargs) -> None:
        """Makes a call of this actor: supervised, and behind what waits already.

        Raises:
            InternalError: the mailbox is full.

        """
        if self.waiting >= limits.MAILBOX_MESSAGES:
            raise refusal(ErrorCode.INTERNAL, f"the mailbox of {self.name} is full ({self.waiting} calls)")
        self.waiting += 1
        self._dispatcher.put(self, partial(method, **named) if named else method, arguments)

    def has_failed(self, method: Callable[..., None], error: Exception) -> None:
        """Tells the supervisor of a call that raised."""
        self._dispatcher.supervisor.failed(self, name_of(method), error)

    def later(self, delay: float, method: Callable[P, None], *arguments: P.args, **named: P.kwargs) -> Timer:
        """Like `call`, in `delay` seconds."""
        return self.loop.call_later(delay, partial(self.call, method, *arguments, **named))

    def probe(self, answer: Callable[[str], None]) -> None:
        """Calls `answer` with the actor's name, which shows that its calls are made."""
        answer(self.name)
