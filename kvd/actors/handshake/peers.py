"""The peers that we connect to, some at a time: by address, link, agent and worker; and who is told of them.

To open a link takes 0.15 ms, and a ticket may name a thousand addresses that nobody has heard of.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain, islice
from typing import Final, Protocol, TypeVar

import structlog
from msgspec import Struct

from kvd import limits
from kvd.actors.handshake.peer import Peer
from kvd.actors.handshake.peer_table import State
from kvd.actors.runtime.actor import Actor, Component
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.deferred import Batch
from kvd.actors.runtime.pools import PeerView
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.net.interface import PeerPort
from kvd.net.unix import is_trusted
from kvd.protocol import codec
from kvd.protocol.peer import Welcome
from kvd.protocol.status import PeerStatus
from kvd.protocol.types import Message

_FORGOTTEN: Final = "those that nobody needs are forgotten in a while"


class Peers:
    """Two addresses may lead to one daemon; it is then two peers with one agent."""

    def __init__(self) -> None:
        self.by_address: dict[str, Peer] = {}
        self.by_link: dict[int, Peer] = {}
        self._troubled: dict[int, Peer] = {}
        """Those that are not ready, or slow, by link."""
        self._of_worker: Counter[tuple[str, int]] = Counter()
        """By name and user: another user may have the name next."""
        self._of_stranger: Counter[int] = Counter()
        """By user."""

    def check_room(self, worker: str, user: int, waiting: int = 0) -> None:
        """Checks that there is room for another peer, for pulls of `worker`, of `user` (empty if it is expected).

        So many more are `waiting` to become peers.

        Raises:
            Unavailable: `OVERLOADED`, there are too many, in all or for this worker or user.

        """
        if len(self.by_address) + waiting >= limits.MAX_PEERS:
            raise refusal(ErrorCode.OVERLOADED, f"{limits.MAX_PEERS} peers are known, which is the bound")
        if worker and self._of_worker[worker, user] + waiting >= limits.MAX_PEERS_PER_WORKER:
            text = f"pulls of {worker!r} name {limits.MAX_PEERS_PER_WORKER} daemons, which is a worker's share"
            raise refusal(ErrorCode.OVERLOADED, f"{text}; {_FORGOTTEN}")
        if worker and not is_trusted(user):
            for bound, count, whose in (
                (limits.MAX_PEERS_PER_STRANGER, self._of_stranger[user], f"user {user}"),
                (limits.MAX_PEERS_OF_STRANGERS, self._of_stranger.total(), "users but root and the daemon's own"),
            ):
                if count + waiting >= bound:
                    raise refusal(
                        ErrorCode.OVERLOADED, f"pulls of {whose} name {bound} daemons, the bound; {_FORGOTTEN}"
                    )

    def add(self, peer: Peer) -> None:
        """Adds a new peer."""
        self.by_address[peer.address] = self.by_link[peer.link] = self._troubled[peer.link] = peer
        self._count(peer, +1)

    def expect(self, peer: Peer) -> None:
        """Counts a peer for no worker any more, as it is not forgotten while it is expected."""
        self._count(peer, -1)
        peer.worker = ""

    def _count(self, peer: Peer, change: int) -> None:
        if peer.worker:
            _add(self._of_worker, (peer.worker, peer.user), change)
            if not is_trusted(peer.user):
                _add(self._of_stranger, peer.user, change)

    def remove(self, peer: Peer) -> None:
        """Forgets a peer."""
        del self.by_address[peer.address], self.by_link[peer.link]
        self._troubled.pop(peer.link, None)
        self._count(peer, -1)

    def entered(self, peer: Peer) -> None:
        """Notes that a peer has entered another state."""
        if peer.state is State.READY and not peer.slow:
            self._troubled.pop(peer.link, None)
        elif peer.state is not State.CLOSED:
            self._troubled[peer.link] = peer

    def using(self, agent: str) -> list[Peer]:
        """The peers whose memory is reached, or about to be, by this agent."""
        return [peer for peer in self.by_address.values() if peer.agent == agent]

    def given(self, welcome: Welcome) -> None:
        """Notes whose keys the transport is given: for all links to that daemon, as it has them once."""
        for peer in self.using(welcome.agent):
            peer.starts = welcome.starts

    def reports(self, now: float) -> list[PeerStatus]:
        """Their entries in a status: a bounded number, those in trouble first."""
        well = (peer for peer in self.by_address.values() if peer.link not in self._troubled)
        told = islice(chain(self._troubled.values(), well), limits.MAX_REPORTED_PEERS)
        return [peer.report(now) for peer in told]


K = TypeVar("K")


def _add(counter: Counter[K], key: K, change: int) -> None:
    counter[key] += change
    if not counter[key]:
        del counter[key]


class PeerChannel:
    """Sends to peers that we connect to by their address, and to those that connect to us by their routing id."""

    def __init__(self, context: ActorContext, port: PeerPort, peers: Peers) -> None:
        self._context = context
        self._port = port
        self._peers = peers

    def ask(self, address: str, request: Message) -> None:
        """Sends a request to the peer at `address`; it is lost if there is no link to that peer."""
        peer = self._peers.by_address.get(address)
        if peer is not None:
            peer.needed = self._context.loop.time()
            self._port.ask(peer.link, codec.encode(request))

    def answer(self, sender: bytes, reply: Message) -> None:
        """Answers a peer that connected to us; lost if it is gone."""
        self._port.answer(sender, codec.encode(reply))


class PeerDown(Protocol):
    """Requests to the peer at `address` are lost. If `restarted`, another run of it is being greeted."""

    def __call__(self, address: str, reason: str, *, restarted: bool) -> None:
        """See above."""


class PeerListener(Struct, frozen=True):
    """Is told what becomes of the peers that pulls need."""

    up: Callable[[PeerView], None]
    """A peer is ready, or has told us about its pools again."""
    down: PeerDown
    refused: Callable[[str, Mapping[str, str]], None]
    """Why the daemons at these addresses cannot be connected to for pulls of this worker."""
    idle: Callable[[str, int], None]
    """No pull has needed the peer at this address for long; answered by `HandshakeActor.forget` unless one will.

    The number says how often `up` was called for it; the answer repeats it.
    """


_log = structlog.get_logger("kvd.handshake")

_AT_ONCE: Final = 16
"""Links that are opened before sockets are read again."""

_AGAIN_SECONDS: Final = 5.0
"""Between two attempts to meet expected peers that could not be connected to."""
_LOGGED_SECONDS: Final = 300.0
"""Between two lines of the log about one of them."""

_EXPECTED: Final = ""
"""In place of a worker's name."""


class Connector(Component):
    """Calls `opened` with each new peer, and `met(address, worker)` once the peer is known that a pull needs.

    `user_of` says whose a worker is.
    """

    def __init__(
        self,
        actor: Actor,
        context: ActorContext,
        port: PeerPort,
        peers: Peers,
        listener: PeerListener,
        *,
        opened: Callable[[Peer], None],
        met: Callable[[str, str], None],
        user_of: Callable[[str], int],
    ) -> None:
        self.expected: frozenset[str] = frozenset()
        """Where daemons are that are met ahead of the first pull."""
        self.actor = actor
        self._context = context
        self._port = port
        self._peers = peers
        self._listener = listener
        self._opened = opened
        self._met = met
        self._user_of = user_of
        self._wanted: dict[str, dict[str, None]] = {}
        """Addresses in order, by the worker whose pulls need the daemons there."""
        self._refused: dict[str, dict[str, str]] = {}
        """Why not, of addresses by worker."""
        self._unmet: dict[str, float] = {}
        """Expected ones that could not be met, and when that was logged last; they are tried again."""
        self._again_waits = False
        self._turns: Batch[str] = Batch(actor, self._connect, lambda _: limits.BATCH_BLOCKS)
        """One worker at a time: it may make up addresses faster than links can be opened."""

    def need(self, address: str, worker: str) -> None:
        """Connects to the daemon that a pull of `worker` needs; the listener's `refused` follows if that cannot be."""
        waiting = self._wanted.get(worker, {})
        if address in waiting:
            self._turns.put(worker)  # it has none if a defect has ended its last one
            return
        try:
            self._peers.check_room(worker, self._user_of(worker), len(waiting))
        except KvdError as error:
            self._refuse(address, worker, error)
        else:
            self._want(address, worker)

    def expect(self, addresses: frozenset[str]) -> None:
        """Connects to these daemons, and those of the last list may be forgotten. Logs those that it cannot meet."""
        for address in sorted(addresses - self.expected):
            self._want(address, _EXPECTED)
        for address in (self.expected - addresses) & self._peers.by_address.keys():
            self._peers.by_address[address].needed = self._context.loop.time()
        self.expected = addresses

    def worker_left(self, worker: str) -> None:
        """No pull of this worker needs anybody any more."""
        self._wanted.pop(worker, None)
        self._refused.pop(worker, None)

    def _want(self, address: str, worker: str) -> None:
        self._wanted.setdefault(worker, {})[address] = None
        self._refused.get(worker, {}).pop(address, None)  # there is room for it by now
        self._turns.put(worker)

    def _refuse(self, address: str, worker: str, error: KvdError) -> None:
        self._refused.setdefault(worker, {})[address] = error.text
        self._turns.put(worker)

    def _connect(self, workers: list[str]) -> None:
        for worker in workers:
            refused = self._refused.pop(worker, {})
            for address in sorted(refused.keys() & self._peers.by_address.keys()):  # others' pulls have met it since
                del refused[address]
                self.actor.call(self._met, address, worker)
            if refused:
                self._listener.refused(worker, refused)
            waiting = self._wanted.get(worker, {})
            for address in list(islice(waiting, _AT_ONCE)):
                del waiting[address]
                self.actor.call(self._connect_to, address, worker)  # a defect costs the one that met it
            if waiting:
                self._turns.put(worker)
            else:
                self._wanted.pop(worker, None)

    def _connect_to(self, address: str, worker: str) -> None:
        try:
            peer = self._peers.by_address.get(address) or self._open(address, worker)
        except KvdError as error:
            if worker == _EXPECTED:
                self._meet_later(address, error.text)
            else:
                self._refuse(address, worker, error)
            return
        if worker == _EXPECTED:
            self._unmet.pop(address, None)
            self._peers.expect(peer)
            peer.needed = self._context.loop.time()
        else:
            self._met(address, worker)

    def _meet_later(self, address: str, why: str) -> None:
        now = self._context.loop.time()
        if now - self._unmet.get(address, -math.inf) >= _LOGGED_SECONDS:
            self._unmet[address] = now
            _log.warning("expected peer cannot be met", address=address, reason=why, again_in=_AGAIN_SECONDS)
        if not self._again_waits:
            self._again_waits = True
            self.actor.later(_AGAIN_SECONDS, self._meet_unmet)

    def _meet_unmet(self) -> None:
        self._again_waits = False
        self._unmet = {address: logged for address, logged in self._unmet.items() if address in self.expected}
        for address in self._unmet:
            self._want(address, _EXPECTED)

    def _open(self, address: str, worker: str) -> Peer:
        user = 0 if worker == _EXPECTED else self._user_of(worker)
        self._peers.check_room(worker, user)
        link = self._port.connect(address, worker)
        now = self._context.loop.time()
        wanted_by = {} if worker == _EXPECTED else {worker: None}
        peer = Peer(address, link, silent_from=now, wanted_by=wanted_by, worker=worker, user=user)
        self._peers.add(peer)
        self._context.metrics.peers.labels(peer.state).inc()
        self._opened(peer)
        return peer
