"""What actors ask of the sockets, and what the sockets tell them.

Actors see bytes and names of connections, never a socket; the simulator implements the same ports in memory.
"""

from collections.abc import Callable
from typing import Final, Protocol

from msgspec import Struct

from kvd.errors import KvdError

EVERY_POOL: Final = ("*",)
"""The patterns of the pools that a peer may read where its line in the allow-list names none."""


class SessionOpened(Struct, frozen=True, gc=False):
    """A process connected to the session socket; the kernel says who it is (SO_PEERCRED)."""

    connection: int
    pid: int
    uid: int
    gid: int


class SessionFrame(Struct, frozen=True, gc=False):
    """One frame on a session, with the descriptors that came along. Whoever handles it closes them."""

    connection: int
    frame: bytes
    descriptors: tuple[int, ...]


class SessionClosed(Struct, frozen=True):
    """The process at the other end closed the session or is gone.

    Where `error` is set we hung up on it (and told it why): what it sent was no frame, or there was no room for it.
    """

    connection: int
    error: KvdError | None = None


class WorkerFrame(Struct, frozen=True, gc=False):
    """One ZMQ frame of a worker; `session` is its routing id, which `Attached` gave it."""

    session: bytes
    frame: bytes
    uid: int
    """The user it comes from, as the kernel says; -1 where that is not known."""


class PeerAsked(Struct, frozen=True, gc=False):
    """One frame of a daemon that connected to us; `sender` is its routing id, for the answer."""

    sender: bytes
    frame: bytes
    key: str = ""
    """The public key that it has proved, in hexadecimal; empty without CURVE."""


class PeerAnswered(Struct, frozen=True, gc=False):
    """One frame of a daemon that we connected to."""

    link: int
    frame: bytes


WorkerEvent = SessionOpened | SessionFrame | SessionClosed | WorkerFrame
PeerEvent = PeerAsked | PeerAnswered


class Intake(Protocol):
    """Whether the daemon keeps up with what its sockets deliver: whoever reads one asks before each frame."""

    def admits(self, again: Callable[[], None]) -> bool:
        """Whether one more frame may be taken in; where not, `again` is called on the loop once one may."""


class Open:
    """The `Intake` of a socket whose frames cost no more than to read them."""

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
        """Sends a frame, with duplicates of `descriptors` and of our process's; a closed session is ignored."""

    def close_session(self, connection: int) -> None:
        """Hangs up on a session, after what was sent to it. No `SessionClosed` follows."""

    def discard(self, descriptors: tuple[int, ...]) -> None:
        """Closes descriptors that came along with a frame that nobody wants."""

    def send(self, session: bytes, frame: bytes) -> bool:
        """Sends a frame to a worker; False where its queue is full or it is not connected."""

    def close(self) -> None:
        """Closes the sockets and removes their files."""


class PeerPort(Protocol):
    """The socket that peers connect to, and one socket for each peer that we connect to."""

    @property
    def address(self) -> str:
        """Where peers reach us."""

    def start(self, on_event: Callable[[PeerEvent], None], intake: Intake = OPEN) -> None:
        """Binds; `on_event` is called on the loop, as often as `intake` admits it."""

    def connect(self, address: str) -> int:
        """Opens a link to a daemon; connects in the background and again after a loss.

        Raises:
            BadRequest: `BAD_TICKET`, the address is not one that ZMQ understands; `NOT_PERMITTED`, its daemon is not
                one that we trust.

        """

    def ask(self, link: int, frame: bytes) -> bool:
        """Sends a frame on a link; False where its queue is full."""

    def answer(self, sender: bytes, frame: bytes) -> bool:
        """Sends a frame to a daemon that connected to us; False where its queue is full or it is gone."""

    def disconnect(self, link: int) -> None:
        """Closes a link and drops what waits on it."""

    def close(self) -> None:
        """Closes everything."""
