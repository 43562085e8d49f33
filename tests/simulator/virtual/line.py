"""A worker's connection in the simulated world: what `kvd.client.driver` has in place of sockets, poll(2) and a map."""

from collections import deque
from collections.abc import Callable

from kvd.client.connection import Connection, Phase
from kvd.client.pool import PoolMap
from kvd.errors import BadRequest, ErrorCode, Unavailable, error_from_code
from kvd.protocol import codec
from kvd.protocol.worker import Attach, Attached, Detach, Detached, Refused
from tests.simulator.virtual.fleet import Daemon
from tests.simulator.virtual.loop import Process
from tests.simulator.virtual.memory import File, Kernel
from tests.simulator.virtual.network import Session

_SESSION, _REQUESTS = 1, 2
"""Stand-ins for the two sockets' descriptors."""
_PROCESS = 0
"""Stand-in for the pidfd of a daemon's process."""


class SimPool(PoolMap):
    """A worker's pool: the descriptor that it keeps, and the file behind it; as `kvd.client.pool.PoolMap`."""

    def __init__(self, kernel: Kernel, descriptor: int) -> None:
        self.descriptor = descriptor
        self.file: File = kernel.file(descriptor)
        self._kernel = kernel

    def is_same(self, descriptor: int) -> bool:
        """Whether `descriptor` leads to the very same memory."""
        return self._kernel.file(descriptor) is self.file


class Line:
    """One session after it was connected; implements `tests.simulator.virtual.network.Receiver`."""

    def __init__(self, wake: Callable[[bytes], None]) -> None:
        self.answers: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self.frames: deque[bytes] = deque()
        self.ended = False
        self._wake = wake

    def on_session(self, frame: bytes, descriptors: tuple[int, ...]) -> None:
        """A frame on the session socket."""
        self.answers.append((frame, descriptors))
        self._wake(b"")

    def on_frame(self, frame: bytes) -> None:
        """A frame on the request socket."""
        self.frames.append(frame)
        self._wake(frame)

    def on_closed(self) -> None:
        """End of file."""
        self.ended = True
        self._wake(b"")


class SimConnection(Connection):
    """Connects a worker's process to its daemon; also the poller of its driver.

    `heard` is called with each request frame that arrives, and with nothing where something else did.
    """

    def __init__(self, kernel: Kernel, daemon: Daemon, process: Process, heard: Callable[[bytes], None]) -> None:
        self.phase = Phase.DOWN
        self.session: Session | None = None
        self._line = Line(heard)
        self._kernel = kernel
        self._home = daemon
        self._process = process
        self._heard = heard
        self._lender: Process | None = None

    @property
    def listened_to(self) -> bool:
        """Whether a daemon is listening."""
        return self._home.worker_port.listening

    # --- the poller -------------------------------------------------------------------------------------------------

    def poll(self, _milliseconds: float) -> list[tuple[int, int]]:
        """What can be read."""
        line = self._line
        readable = [(_SESSION, 1)] if line.answers or line.ended else []
        return [*readable, (_REQUESTS, 1)] if line.frames else readable

    def register(self, fileno: int, events: int) -> None:
        """Nothing to do: both are always polled."""

    def unregister(self, fileno: int) -> None:
        """Nothing to do."""

    # --- the connection ---------------------------------------------------------------------------------------------

    @property
    def unread(self) -> bool:
        """Whether to `receive` before waiting."""
        return bool(self._line.frames)

    @property
    def unsent(self) -> bool:
        """Never blocks."""
        return False

    def filenos(self) -> tuple[int, ...]:
        """Descriptors of the open sockets."""
        return (_SESSION, _REQUESTS) if self.phase in {Phase.JOINING, Phase.ATTACHED} else (_SESSION,)

    def open(self, attach: Attach, descriptor: int | None) -> None:
        """Connects and asks for the pool."""
        if not self.listened_to:
            raise ConnectionRefusedError(0, "nobody listens")
        self._line = Line(self._heard)
        self.session = self._home.worker_port.accept(self._process, self._line)
        self.phase = Phase.ATTACHING
        self.session.send_session(codec.encode(attach), () if descriptor is None else (descriptor,))

    def daemon_exited(self) -> bool:
        """Whether the process that last lent the pool is dead."""
        return self._lender is not None and self._lender.dead

    def flush(self) -> None:
        """Never blocks."""

    def receive_session(self) -> tuple[Attached, int, int] | Detached | None:
        """As `Connection.receive_session`."""
        line = self._line
        if not line.answers:
            if line.ended:
                raise Unavailable(ErrorCode.DAEMON_LOST, "the daemon ended the session")
            return None
        frame, descriptors = line.answers.popleft()
        match codec.session_replies.decode(frame):
            case Refused(code, text):
                raise error_from_code(code, text)
            case Attached() as attached if self.phase is Phase.ATTACHING:
                return attached, descriptors[0], _PROCESS
            case Detached() as detached:
                return detached
            case _:
                raise BadRequest(ErrorCode.BAD_MESSAGE, "an answer that nothing was asked for by")

    def attach(self, attached: Attached, process: int) -> None:
        assert self.session is not None
        self.session.connect_requests(attached.session)
        self._lender = self.session.port.process
        self.phase = Phase.JOINING

    def join(self, seconds: float = 0.0) -> bool:
        """At once."""
        self.phase = Phase.ATTACHED
        return True

    def detach(self) -> None:
        """Asks the daemon to take the pool back."""
        assert self.session is not None
        self.session.send_session(codec.encode(Detach()))

    def send(self, frame: bytes) -> bool:
        if self.session is not None:
            self.session.send(frame)
        return self.session is not None

    def receive(self) -> bytes | None:
        """The next frame of the daemon."""
        return self._line.frames.popleft() if self._line.frames else None

    def discard(self, descriptor: int) -> None:
        """Closes a descriptor that came along."""
        if descriptor != _PROCESS:
            self._kernel.close(descriptor)

    def drop(self) -> None:
        session, self.session, self._line = self.session, None, Line(lambda _frame: None)
        if session is not None:
            session.hang_up(lose=True)
        self.phase = Phase.DOWN

    def close(self) -> None:
        """Like `drop`: nothing is left of a process that ended."""
        self.drop()
