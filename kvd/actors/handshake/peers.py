"""The peers that we connect to, by address, link, agent and worker; what is sent to peers; who is told of them."""

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain, islice
from typing import Protocol

from msgspec import Struct

from kvd import limits
from kvd.actors.handshake.peer import Peer
from kvd.actors.handshake.peer_table import State
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.pools import PeerView
from kvd.errors import ErrorCode, refusal
from kvd.net.interface import PeerPort
from kvd.protocol import codec
from kvd.protocol.peer import Welcome
from kvd.protocol.status import PeerStatus
from kvd.protocol.types import Message


class Peers:
    """Two addresses may lead to one daemon; it is then two peers with one agent."""

    def __init__(self) -> None:
        self.by_address: dict[str, Peer] = {}
        self.by_link: dict[int, Peer] = {}
        self._troubled: dict[int, Peer] = {}
        """Those that are not ready, or slow, by link."""
        self._of_worker: Counter[str] = Counter()

    def check_room(self, worker: str, waiting: int = 0) -> None:
        """Checks that there is room for another peer, for pulls of `worker` (empty if it is expected).

        So many more are `waiting` to become peers.

        Raises:
            Unavailable: `OVERLOADED`, there are too many, in all or for this worker.

        """
        if len(self.by_address) + waiting >= limits.MAX_PEERS:
            raise refusal(ErrorCode.OVERLOADED, f"{limits.MAX_PEERS} peers are known, which is the bound")
        if worker and self._of_worker[worker] + waiting >= limits.MAX_PEERS_PER_WORKER:
            text = f"pulls of {worker!r} name {limits.MAX_PEERS_PER_WORKER} daemons, which is a worker's share"
            raise refusal(ErrorCode.OVERLOADED, f"{text}; those that it does not need are forgotten in a while")

    def add(self, peer: Peer) -> None:
        """Adds a new peer."""
        self.by_address[peer.address] = self.by_link[peer.link] = self._troubled[peer.link] = peer
        self._of_worker[peer.worker] += 1

    def remove(self, peer: Peer) -> None:
        """Forgets a peer."""
        del self.by_address[peer.address], self.by_link[peer.link]
        self._troubled.pop(peer.link, None)
        self._of_worker -= Counter([peer.worker])

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
