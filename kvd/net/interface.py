"""The interface between actors and sockets: events in, calls out.

Actors see bytes and numbers of connections, never a socket; the simulator implements the same ports in memory.
"""

from collections.abc import Callable
from typing import Final, Protocol

from msgspec import Struct

from kvd.errors import KvdError

EVERY_POOL: Final = ("*",)
"""The pools that a peer may read if its line in the allow-list names none."""


class SessionOpened(Struct, frozen=True, gc=False):
    """A process connected to the session socket; its ids are from the kernel (SO_PEERCRED)."""

    connection: int
    pid: int
    """0 if its PID namespace is not visible to us."""
    uid: int
    gid: int
    watched: bool = True
    """Whether a `ProcessEnded` will follow; not on kernels before 6.5 if `pid` is 0."""


class ProcessEnded(Struct, frozen=True, gc=False):
    """The process that opened the session has ended: nothing of it runs, and its descriptors are closed.

    The session may be open still, if another process inherited it, or have been closed long before.
    """

    connection: int


class SessionFrame(Struct, frozen=True, gc=False):
    """One frame on a session, with the descriptors that came along; the receiver closes them."""

    connection: int
    frame: bytes
    descriptors: tuple[int, ...]


class SessionClosed(Struct, frozen=True):
    """The process at the other end closed the session or is gone.

    If `error` is set, we hung up and told it why: it did not send valid frames, or there was no room for them.
    """

    connection: int
    error: KvdError | None = None


class WorkerFrame(Struct, frozen=True, gc=False):
    """One ZMQ message of a worker, empty for invalid bytes; `session` is its routing id, from `Attached`."""

    session: bytes
    frame: bytes
    uid: int
    """The sending process's user, from the kernel."""


class PeerAsked(Struct, frozen=True, gc=False):
    """One frame of a daemon that connected to us; `sender` is its routing id, for the answer."""

    sender: bytes
    frame: bytes
    key: str = ""
    """The public key that it proved, in hexadecimal; empty without CURVE."""


class PeerAnswered(Struct, frozen=True, gc=False):
    """One frame of a daemon that we connected to."""

    link: int
    frame: bytes


WorkerEvent = SessionOpened | SessionFrame | SessionClosed | ProcessEnded | WorkerFrame
PeerEvent = PeerAsked | PeerAnswered


class Intake(Protocol):
    """Back pressure: readers of sockets ask before each frame whether the daemon keeps up."""

    def admits(self, again: Callable[[], None]) -> bool:
        """Whether one more frame may be taken in; if not, `again` is called on the loop once it may."""


class Open:
    """An `Intake` that admits everything."""

    def admits(self, again: Callable[[], None]) -> bool:  # noqa: ARG002
        """Always."""
        return True


OPEN: Final = Open()


class WorkerPort(Protocol):
    """The two local sockets: sessions (Unix stream) and requests (ZMQ over ipc)."""

    @property
    def endpoint(self) -> str:
        """Where a worker connects its ZMQ socket."""

    def start(self, on_event: Callable[[WorkerEvent], None], intake: Intake = OPEN) -> None:
        """Binds and listens; `on_event` is called on the loop, as often as `intake` admits it."""

    def send_session(self, connection: int, frame: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Sends a frame, and duplicates of `descriptors` and of what tells of our end; a closed session is ignored."""

    def close_session(self, connection: int) -> None:
        """Hangs up on a session, after what was sent to it. No `SessionClosed` follows."""

    def forget_process(self, connection: int) -> None:
        """Stops watching the process that opened a session: no `ProcessEnded` follows."""

    def discard(self, descriptors: tuple[int, ...]) -> None:
        """Closes the descriptors of a frame that is not used."""

    def send(self, session: bytes, frame: bytes) -> bool:
        """Sends a frame to a worker; False if its queue is full or it is not connected."""

    def close(self) -> None:
        """Closes the sockets and removes their files."""


class PeerPort(Protocol):
    """The socket that peers connect to, and one socket for each peer that we connect to."""

    @property
    def address(self) -> str:
        """Where peers reach us."""

    def start(self, on_event: Callable[[PeerEvent], None], intake: Intake = OPEN) -> None:
        """Binds; `on_event` is called on the loop, as often as `intake` admits it."""

    def connect(self, address: str, party: str = "") -> int:
        """Opens a link to a daemon; connects in the background and again after a loss.

        A name in the address is looked up by `greet`. Parties take turns at that: whoever has us connect.

        Raises:
            BadRequest: `BAD_TICKET`, the address is invalid; `NOT_PERMITTED`, we do not trust its daemon.

        """

    def greet(self, link: int, frame: bytes) -> None:
        """Sends the first frame on a link, or the first after a loss, to where its daemon is now; perhaps twice."""

    def hurry(self, link: int, party: str, /) -> None:
        """Has the name of a link that waits to be looked up wait for the turn of this party, too."""

    def trouble(self, link: int, /) -> str:
        """Why the daemon of a link is not connected to, beyond that it does not answer; else empty."""

    def ask(self, link: int, frame: bytes) -> bool:
        """Sends a frame on a link; False if its queue is full."""

    def answer(self, sender: bytes, frame: bytes) -> bool:
        """Sends a frame to a daemon that connected to us; False if its queue is full or it is gone."""

    def disconnect(self, link: int) -> None:
        """Closes a link and drops its unsent frames."""

    def close(self) -> None:
        """Closes everything."""
