"""A ZMQ socket: every option that kvd's behaviour depends on, with its reason, and how a loop drives it.

ZMQ's descriptor is edge-triggered: it reports once that something may have changed. So after each use of the socket the
pump has to check it again: after a wake-up it receives until nothing is left, and after a send (which takes in what
arrived meanwhile) it checks if there is something to receive.
"""

import asyncio
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final

import zmq

from kvd import limits
from kvd.limits import BACKLOG, HANDSHAKE_MS, LINGER_MS, MIB, RECONNECT_MAX_MS, RECONNECT_MS, SEND_MESSAGES
from kvd.net.interface import OPEN, Intake


class Kind(Enum):
    """The kinds of sockets of libzmq's; between a worker and its daemon there is none (`kvd.net.local.zmtp`)."""

    PEER_ROUTER = "the daemon's end for peers that connect to it, tcp or ipc"
    PEER_DEALER = "the daemon's end for a peer it connects to, tcp or ipc"
    ENGINE_PUSH = "an engine's end for the control socket of another, tcp"


_CONNECTING: Final = (Kind.PEER_DEALER, Kind.ENGINE_PUSH)
_ALL: Final = tuple(Kind)

RECEIVE_REQUESTS: Final = 64
"""In a daemon, from one peer that connected: 64 MiB, as a request has at most 1 MiB."""
RECEIVE_LARGE: Final = 16
"""In a daemon, from one peer that it connected to: 256 MiB, as frames may have 16 MiB."""
UNANSWERED_MS: Final = 5000
CONNECT_TIMEOUT_MS: Final = 1000

TABLE: Final[tuple[tuple[zmq.SocketOption, int, tuple[Kind, ...], str], ...]] = (
    (
        zmq.LINGER,
        LINGER_MS,
        _ALL,
        "final messages (a shutdown's failures, an acknowledgement) get out; a dead reader delays an exit by this",
    ),
    (
        zmq.MAXMSGSIZE,
        limits.MAX_MESSAGE_BYTES,
        (Kind.PEER_DEALER,),
        "a larger frame costs its sender the connection before the memory is taken",
    ),
    (
        zmq.MAXMSGSIZE,
        limits.MAX_PEER_REQUEST_BYTES,
        (Kind.PEER_ROUTER,),
        "the same, also during the handshake: a routing id is kept as long as its connection",
    ),
    (
        zmq.SNDHWM,
        SEND_MESSAGES,
        _ALL,
        "messages waiting for one reader; sending to a full queue fails. Messages to a peer have a few KiB each, what "
        "offers have grown by 64 KiB, and welcomes share one copy",
    ),
    (
        zmq.RCVHWM,
        RECEIVE_REQUESTS,
        (Kind.PEER_ROUTER,),
        "unread messages of one sender: beyond it the sender's own queue fills, not our memory",
    ),
    (zmq.RCVHWM, RECEIVE_LARGE, (Kind.PEER_DEALER,), "the same; fewer, as each may be larger"),
    (
        zmq.IMMEDIATE,
        0,
        _CONNECTING,
        "messages sent before the connection is made wait for it, so a first hello needs no retry",
    ),
    (
        zmq.ROUTER_MANDATORY,
        1,
        (Kind.PEER_ROUTER,),
        "sending to an unknown peer or a full queue fails instead of dropping the message silently",
    ),
    (
        zmq.ROUTER_HANDOVER,
        1,
        (Kind.PEER_ROUTER,),
        "a peer that connects again takes over from its own dead connection at once",
    ),
    (zmq.BACKLOG, BACKLOG, (Kind.PEER_ROUTER,), "a whole fleet's daemons start at once"),
    (zmq.HANDSHAKE_IVL, HANDSHAKE_MS, _ALL, "a connection that stays silent, or sends garbage slowly, is closed"),
    (
        zmq.HEARTBEAT_IVL,
        0,
        _ALL,
        "libzmq aborts the process where a heartbeat is due on a connection that hung up while it was not read "
        "(its issue 4364); daemons ping each other themselves",
    ),
    (
        zmq.TCP_MAXRT,
        UNANSWERED_MS,
        _ALL,
        "if a peer vanished (power, partition) and has not acknowledged a ping for this long, connect anew",
    ),
    (zmq.TCP_KEEPALIVE, 1, _ALL, "middleboxes drop connections that stay idle"),
    (zmq.TCP_KEEPALIVE_IDLE, 30, _ALL, "seconds; below common middleboxes' idle limits"),
    (zmq.TCP_KEEPALIVE_INTVL, 10, _ALL, "seconds; pings notice a loss sooner"),
    (zmq.TCP_KEEPALIVE_CNT, 3, _ALL, "tolerates a few lost packets"),
    (
        zmq.CONNECT_TIMEOUT,
        CONNECT_TIMEOUT_MS,
        _CONNECTING,
        "retries an absent host every second; the kernel would wait 2 s, then 4 s",
    ),
    (zmq.RECONNECT_IVL, RECONNECT_MS, _CONNECTING, "a restarted daemon is found within tens of milliseconds"),
    (
        zmq.RECONNECT_IVL_MAX,
        RECONNECT_MAX_MS,
        _CONNECTING,
        "the pause doubles up to this; an absent peer costs two packets a second",
    ),
    (zmq.IPV6, 1, _ALL, "allows addresses of both families"),
)


def apply(socket: "zmq.Socket[bytes]", kind: Kind) -> None:
    """Sets every option of `kind` on a socket that is neither bound nor connected yet."""
    for option, value, kinds, _reason in TABLE:
        if kind in kinds:
            socket.setsockopt(option, value)


_READABLE: Final = int(zmq.POLLIN)  # as an int: combining pyzmq's flags takes as long as getting the events


def is_readable(socket: "zmq.Socket[bytes]") -> bool:
    """Whether a message waits. Trying to receive instead costs five times as much if there is none: it raises."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _READABLE)


RECEIVES_PER_WAKE: Final = 64
"""Messages received before the loop's other work gets its turn."""

BYTES_PER_WAKE: Final = 4 * MIB
"""The same, in bytes: decoding a ticket of 11 MiB takes 50 ms, and timers waited for 64 of them."""

_NOBLOCK: Final = int(zmq.NOBLOCK)  # as ints: combining pyzmq's flags takes as long as sending
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)


class SocketPump:
    """Calls `on_message` with the parts of each message that arrives on `socket`, which it owns from now on.

    Each message waits until `intake` admits it. Of many senders (ROUTER), libzmq takes one message each in turn, so
    each gets the same share.

    If `witness` names a libzmq property such as `User-Id`, its value is appended as one more part, empty if there is
    none. It belongs to the connection; no message can forge it.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        on_message: Callable[[list[bytes]], None],
        witness: str = "",
        intake: Intake = OPEN,
    ) -> None:
        self._socket = socket
        self._on_message = on_message
        self._witness = witness
        self._routes = socket.getsockopt(zmq.TYPE) == zmq.ROUTER
        self._intake = intake
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._turn: asyncio.Handle | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._receive)
        self._look_again()

    def send(self, parts: Sequence[bytes | zmq.Frame]) -> bool:
        """Sends without blocking; False if the queue is full or (ROUTER) nobody has that routing id."""
        try:
            for part in parts[:-1]:
                self._socket.send(part, _MORE)
            self._socket.send(parts[-1], _NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        finally:
            self._look_again()
        return True

    def close(self, linger_ms: int | None = None) -> None:
        """Closes the socket after sending for at most `linger_ms` (None: the socket's own option)."""
        if self._socket.closed:
            return
        self._loop.remove_reader(self._descriptor)
        if self._turn is not None:
            self._turn.cancel()
        self._socket.close(linger_ms)

    def _receive(self) -> None:
        self._turn = None
        left = BYTES_PER_WAKE
        for _ in range(RECEIVES_PER_WAKE):
            if left <= 0:
                break
            if self._socket.closed or not is_readable(self._socket) or not self._intake.admits(self._receive):
                return
            try:
                parts = self._take()
            except zmq.Again:
                return
            left -= sum(map(len, parts))
            try:
                self._on_message(parts)
            except Exception:  # a defect: it costs the message that met it, not those behind it
                self._look_again()
                raise
        self._schedule()

    def _take(self) -> list[bytes]:
        if not self._witness:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        # A ROUTER's first part, the sender's id, has no properties; bytes cost less than a Frame.
        parts = [self._socket.recv(zmq.NOBLOCK)] if self._routes else []
        more = True
        while more:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            parts.append(frame.bytes)
            more = frame.more
        try:
            witness = str(frame.get(self._witness))
        except zmq.ZMQError:  # old versions of ZMTP have no properties
            witness = ""
        return [*parts, witness.encode()]

    def _look_again(self) -> None:
        if self._turn is None and is_readable(self._socket):
            self._schedule()

    def _schedule(self) -> None:
        if self._turn is None:
            self._turn = self._loop.call_soon(self._receive)
