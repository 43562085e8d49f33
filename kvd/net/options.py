"""Every option of every ZMQ socket, in one table, with its reason. Nothing is left to the library's defaults.

An option that is not here is one whose default no behaviour of kvd rests on.
"""

from enum import Enum
from typing import Final

import zmq

from kvd import limits


class Kind(Enum):
    """The three kinds of ZMQ socket that kvd has; the daemon's end for workers is `kvd.net.local.router`."""

    WORKER_DEALER = "a worker's end, ipc"
    PEER_ROUTER = "the daemon's end for peers that connect to it, tcp or ipc"
    PEER_DEALER = "the daemon's end for a peer it connects to, tcp or ipc"


_DEALERS: Final = (Kind.WORKER_DEALER, Kind.PEER_DEALER)
_PEERS: Final = (Kind.PEER_ROUTER, Kind.PEER_DEALER)
_ALL: Final = tuple(Kind)

LINGER_MS: Final = 200
SEND_MESSAGES: Final = 4096
RECEIVE_MESSAGES: Final = 1024
"""In a worker, of its daemon: an engine may look once a step only."""
RECEIVE_ASKS: Final = 64
"""In a daemon, of one peer that connected: 64 MiB, as an ask has 1 MiB at most."""
RECEIVE_LARGE: Final = 16
"""In a daemon, of one peer that it connected to: 256 MiB, as frames may have 16 MiB."""
UNANSWERED_MS: Final = 5000
HANDSHAKE_MS: Final = 5000
CONNECT_TIMEOUT_MS: Final = 1000
RECONNECT_MS: Final = 20
RECONNECT_MAX_MS: Final = 500
BACKLOG: Final = 1024

TABLE: Final[tuple[tuple[zmq.SocketOption, int, tuple[Kind, ...], str], ...]] = (
    (
        zmq.LINGER,
        LINGER_MS,
        _ALL,
        "last words (a shutdown's failures, an acknowledgement) get out; a dead reader delays an exit by this",
    ),
    (
        zmq.MAXMSGSIZE,
        limits.MAX_MESSAGE_BYTES,
        _DEALERS,
        "a larger frame costs its sender the connection before the memory is taken",
    ),
    (
        zmq.MAXMSGSIZE,
        limits.MAX_ASK_BYTES,
        (Kind.PEER_ROUTER,),
        "the same, also for what comes before the handshake is over: a routing id is kept as long as its connection",
    ),
    (
        zmq.SNDHWM,
        SEND_MESSAGES,
        _ALL,
        "messages waiting for one reader: as many as one worker has requests; a full queue is told to the sender. To a "
        "peer that is a few KiB each at most, but for welcomes, which lie in memory once",
    ),
    (
        zmq.RCVHWM,
        RECEIVE_MESSAGES,
        (Kind.WORKER_DEALER,),
        "messages that are not read yet: beyond it the daemon's queue fills, and it keeps what was not acknowledged",
    ),
    (
        zmq.RCVHWM,
        RECEIVE_ASKS,
        (Kind.PEER_ROUTER,),
        "messages of one sender that are not read yet: beyond it the sender's own queue fills, not our memory",
    ),
    (zmq.RCVHWM, RECEIVE_LARGE, (Kind.PEER_DEALER,), "the same, fewer as each may be larger"),
    (
        zmq.IMMEDIATE,
        0,
        _DEALERS,
        "what is sent before the connection stands waits for it: a first hello costs no retry",
    ),
    (
        zmq.ROUTER_MANDATORY,
        1,
        (Kind.PEER_ROUTER,),
        "an answer to nobody, or to a full queue, is told to the sender and not dropped unseen",
    ),
    (
        zmq.ROUTER_HANDOVER,
        1,
        (Kind.PEER_ROUTER,),
        "who connects again under its routing id takes over from its own dead connection at once",
    ),
    (zmq.BACKLOG, BACKLOG, (Kind.PEER_ROUTER,), "an engine's ranks and a whole fleet's daemons start at one time"),
    (zmq.HANDSHAKE_IVL, HANDSHAKE_MS, _ALL, "a connection that says nothing, or garbage slowly, does not stay"),
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
        _PEERS,
        "a peer that vanished without a word (power, partition) has not acknowledged a ping for so long: connect anew",
    ),
    (zmq.TCP_KEEPALIVE, 1, _PEERS, "middleboxes keep idle connections that show life"),
    (zmq.TCP_KEEPALIVE_IDLE, 30, _PEERS, "seconds; below the idle limits of common middleboxes"),
    (zmq.TCP_KEEPALIVE_INTVL, 10, _PEERS, "seconds; pings are the quicker judge"),
    (zmq.TCP_KEEPALIVE_CNT, 3, _PEERS, "a few losses are no death"),
    (
        zmq.CONNECT_TIMEOUT,
        CONNECT_TIMEOUT_MS,
        (Kind.PEER_DEALER,),
        "a host that is away is tried anew every second, where the kernel would wait for two more, then four",
    ),
    (zmq.RECONNECT_IVL, RECONNECT_MS, _DEALERS, "a daemon that restarts is back within tens of milliseconds"),
    (
        zmq.RECONNECT_IVL_MAX,
        RECONNECT_MAX_MS,
        _DEALERS,
        "doubling to here; an absent peer costs two packets a second",
    ),
    (zmq.IPV6, 1, _PEERS, "addresses of both families work"),
)


def apply(socket: "zmq.Socket[bytes]", kind: Kind) -> None:
    """Sets every option of `kind` on a socket that is neither bound nor connected yet."""
    for option, value, kinds, _reason in TABLE:
        if kind in kinds:
            socket.setsockopt(option, value)


_READABLE: Final = int(zmq.POLLIN)  # as an int: to compute with pyzmq's flags takes as long as to ask for the events


def is_readable(socket: "zmq.Socket[bytes]") -> bool:
    """Whether a message waits. An attempt that finds none costs five times as much: it ends in an exception."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _READABLE)
