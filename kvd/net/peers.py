"""The sockets between daemons: one ROUTER that peers connect to, one DEALER for each peer that we connect to.

With CURVE, an address includes the daemon's public key: `tcp://host:port#<64 hexadecimal digits>`. Tickets carry all
of it, and place and key together identify a peer: a ticket with the right place and a wrong key is about another peer,
so it cannot harm tickets that name the right one.

A Unix socket, `ipc:///path.peers`, needs no key: the kernel says which user is at the other end, and both ends talk
only to daemons of their own user. With keys it is open to every user.

Each link has its own routing id, `<daemon>#<incarnation>#<token>`, so that two links to one daemon do not take over
each other's connection; others cannot either, as they would have to guess the token.
"""

import itertools
import os
import re
import resource
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import zmq

from kvd.errors import ErrorCode, refusal
from kvd.net.addresses import Resolve, check_address, check_own, check_user, resolve
from kvd.net.interface import OPEN, Intake, PeerAnswered, PeerAsked, PeerEvent
from kvd.net.local.own_user import OwnUserPeers
from kvd.net.lock import PathLock
from kvd.net.trust import OnRejected, Trust
from kvd.net.zmq_peers import ZmqPeers
from kvd.protocol.address import is_everywhere

_TCP_WITHOUT_KEYS = (
    "is reached over TCP, where nothing proves who answers; give both daemons `curve_key` and `curve_peers`, and this "
    "one `listen` at tcp://, or that and `--insecure` if everybody on the network is trusted"
)
_DESCRIPTORS_OVER_TCP = 4
"""The socket's own, its connection's, one for the peer's connection to us, and one for everything else."""
_DESCRIPTORS_OF_OWN_USER = 6
"""The same over Unix sockets without keys: its connection, the peer's to us, three for its pools, and one."""
DESCRIPTORS_PER_LINK = 12
"""The same with keys, where both connections go through relays: six, three, and three for the peer's pools."""


@dataclass(frozen=True, slots=True)
class _Link:
    """A daemon that we connected to."""

    carrier: OwnUserPeers | ZmqPeers
    key: bytes | None
    """Its public key; None without CURVE."""


class PeerSockets:
    """A `kvd.net.interface.PeerPort` over ZMQ.

    `listen` is the address to bind (`tcp://host:port`, port 0 for a free one, or `ipc:///path.peers`). `agent`
    names this daemon in this run to every peer, 1 to 220 bytes. `advertise` is the address that peers use, if
    it is not the bound one. `folder` is one where sockets can be made, that of the Unix socket unless it is given.
    With `trust`, both ends of every connection prove an allowed key; `on_rejected` is told about those that do not.
    Without, a daemon at a Unix socket connects only to Unix sockets, and one at `tcp://` trusts its network.
    """

    def __init__(
        self,
        listen: str,
        agent: bytes,
        advertise: str | None = None,
        *,
        trust: Trust | None = None,
        on_rejected: OnRejected = lambda _rejection: None,
        folder: str | None = None,
        resolve: Resolve = resolve,
    ) -> None:
        match = check_own(listen)
        if advertise is not None:
            check_own(advertise)
        elif is_everywhere(listen):
            raise refusal(
                ErrorCode.BAD_CONFIG, f"{listen!r} listens on every address: say which one peers reach (`advertise`)"
            )
        self._listen = listen
        self._path: str | None = match["path"]
        self._lock: PathLock | None = None
        self._agent = agent
        self._advertise = advertise
        self._trust = trust
        self._own_user = OwnUserPeers(on_rejected)
        folder = folder or (os.path.dirname(self._path) if self._path else tempfile.gettempdir())
        self._zmq = ZmqPeers(folder, trust, on_rejected, resolve)
        self._server = self._carrier(self._path)
        self._links: dict[int, _Link] = {}
        self._numbers = itertools.count(1)
        self._on_event: Callable[[PeerEvent], None] | None = None
        self._closed = False

    @property
    def address(self) -> str:
        """Where peers reach us, with our public key; known once started."""
        if self._advertise is None:
            raise RuntimeError("the address is known once the sockets have started")
        return f"{self._advertise}#{self._trust.pair.public.hex()}" if self._trust else self._advertise

    def start(self, on_event: Callable[[PeerEvent], None], intake: Intake = OPEN) -> None:
        """Binds; `on_event` is called on the running loop, as often as `intake` admits it.

        Raises:
            BadRequest: `BAD_CONFIG`, the address cannot be bound (in use, not ours).

        """
        self._on_event = on_event
        self._own_user.inlet.intake = self._zmq.intake = intake
        if self._path is not None:
            self._lock = PathLock(self._path)
        try:
            place = self._listen_at(on_event)
        except (OSError, zmq.ZMQError) as error:
            self.close()
            raise refusal(ErrorCode.BAD_CONFIG, f"cannot listen on {self._listen!r}: {error}") from error
        if self._advertise is None or self._path is not None:
            self._advertise = place

    def _listen_at(self, on_event: Callable[[PeerEvent], None]) -> str:
        if self._path is not None and self._server is self._own_user:
            self._own_user.listen(self._path, lambda sender, _uid, frame: on_event(PeerAsked(sender, frame)))
            return self._listen
        return self._zmq.listen(
            self._listen, self._path, lambda sender, frame, key: on_event(PeerAsked(sender, frame, key))
        )

    def _carrier(self, path: str | None) -> OwnUserPeers | ZmqPeers:
        """What talks to peers at a Unix socket, or over TCP if `path` is None."""
        return self._zmq if path is None or self._trust is not None else self._own_user

    def connect(self, address: str, party: str = "") -> int:
        """Opens a link to a daemon, as `PeerPort` says.

        Raises:
            BadRequest: `BAD_TICKET`, the address is malformed, or has a `#key` although we do not use CURVE or none
                although we do; `NOT_PERMITTED`, its key is not on the allow-list, or without keys: it is another
                user's daemon on this host, or one reached over TCP while we listen on a Unix socket.
            Unavailable: `OVERLOADED`, no socket or no descriptor can be had for another peer, or `close` was called.

        """
        on_event = self._on_event
        if on_event is None:
            raise RuntimeError("start the sockets before connecting")
        if self._closed:
            raise refusal(ErrorCode.OVERLOADED, "this daemon is stopping: it connects to no more peers")
        match = check_address(address, ErrorCode.BAD_TICKET)
        key = self._server_key(match)
        if self._trust is None and match["path"] is not None:
            check_user(match["path"])
        self._leave_descriptors()
        link, routing_id = next(self._numbers), self._agent + b"#" + secrets.token_hex(8).encode()

        def received(frame: bytes) -> None:
            if self._still_allowed(key):
                on_event(PeerAnswered(link, frame))

        carrier = self._carrier(match["path"])
        if carrier is self._own_user:
            self._own_user.connect(link, match["path"], routing_id, received)
        else:
            self._zmq.connect(link, match, routing_id, received, key=key, party=party)
        self._links[link] = _Link(carrier, key)
        return link

    def _leave_descriptors(self) -> None:
        """Refuses another link where sessions and metrics need what descriptors are left."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        each = _DESCRIPTORS_OVER_TCP
        if self._path is not None:
            each = _DESCRIPTORS_OF_OWN_USER if self._trust is None else DESCRIPTORS_PER_LINK
        if len(self._links) >= most // each:
            text = f"{len(self._links)} peers are as many as {most} open files allow; raise LimitNOFILE (ulimit -n)"
            raise refusal(ErrorCode.OVERLOADED, text)

    def _server_key(self, match: re.Match[str]) -> bytes | None:
        """The key that the daemon at an address has to prove; None without CURVE."""
        place, text = match["place"], match["key"]
        if self._trust is None:
            if text is None:
                if match["path"] is None and self._path is not None:
                    raise refusal(ErrorCode.NOT_PERMITTED, f"the daemon at {place} {_TCP_WITHOUT_KEYS}")
                return None
            wrong = f"the daemon at {place} uses CURVE and this one does not; give it `curve_key` and `curve_peers`"
            raise refusal(ErrorCode.BAD_TICKET, wrong)
        if text is None:
            wrong = f"the daemon at {place} uses no CURVE and this one does; give it `curve_key` and `curve_peers`"
            raise refusal(ErrorCode.BAD_TICKET, wrong)
        key = bytes.fromhex(text)
        if self._trust.name_of(key) is None:
            wrong = f"the key {text} of the daemon at {place} is not on the allow-list; add it, then send SIGHUP"
            raise refusal(ErrorCode.NOT_PERMITTED, wrong)
        return key

    def _still_allowed(self, key: bytes | None) -> bool:
        return self._trust is None or (key is not None and self._trust.name_of(key) is not None)

    def greet(self, link: int, frame: bytes) -> None:
        """See `PeerPort`."""
        self._zmq.names.find(link, partial(self.ask, link, frame))

    def hurry(self, link: int, party: str) -> None:
        """See `PeerPort`."""
        self._zmq.names.hurry(link, party)

    def trouble(self, link: int) -> str:
        """See `PeerPort`."""
        known = self._links.get(link)
        return known.carrier.trouble(link) if known else ""

    def ask(self, link: int, frame: bytes) -> bool:
        """Sends a frame on a link; False if its queue is full, it is closed, or its key is no longer allowed."""
        known = self._links.get(link)
        return known is not None and self._still_allowed(known.key) and known.carrier.ask(link, frame)

    def answer(self, sender: bytes, frame: bytes) -> bool:
        """Sends a frame to a daemon that connected to us; False if its queue is full or it is gone."""
        return self._server.answer(sender, frame)

    def disconnect(self, link: int) -> None:
        """Closes a link and drops its unsent frames; ignores an unknown one."""
        known = self._links.pop(link, None)
        if known is not None:
            known.carrier.disconnect(link)

    def close(self) -> None:
        """Closes everything, after what `kvd.limits.LINGER_MS` allows each carrier."""
        self._closed = True
        self._links.clear()
        self._own_user.close()
        self._zmq.close()
        if self._lock is not None and self._path is not None:
            self._lock.release(self._path)
            self._lock = None
