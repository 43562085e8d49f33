"""The peers that we connect to: by address, by link, by agent, and by the worker whose pulls need them."""

from collections import Counter
from itertools import chain, islice

from kvd import limits
from kvd.actors.handshake.peer import Peer
from kvd.errors import ErrorCode, refusal
from kvd.state.peer import State


class Peers:
    """Two addresses may lead to one daemon; it is then two peers with one agent."""

    def __init__(self) -> None:
        self.by_address: dict[str, Peer] = {}
        self.by_link: dict[int, Peer] = {}
        self._troubled: dict[int, Peer] = {}
        """Those that are not ready, or slow, by link."""
        self._of_worker: Counter[str] = Counter()

    def check_room(self, worker: str) -> None:
        """Checks that there is room for another peer, for pulls of `worker` (empty if it is expected).

        Raises:
            Unavailable: `OVERLOADED`, there are too many, in all or for this worker.

        """
        if len(self.by_address) >= limits.MAX_PEERS:
            raise refusal(ErrorCode.OVERLOADED, f"{limits.MAX_PEERS} peers are known, which is the bound")
        if worker and self._of_worker[worker] >= limits.MAX_PEERS_PER_WORKER:
            text = f"pulls of {worker!r} have led to {limits.MAX_PEERS_PER_WORKER} daemons, which is a worker's share"
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

    def reports(self, now: float) -> list[dict[str, object]]:
        """Their entries in a status: a bounded number, those in trouble first."""
        well = (peer for peer in self.by_address.values() if peer.link not in self._troubled)
        told = islice(chain(self._troubled.values(), well), limits.MAX_REPORTED_PEERS)
        return [peer.report(now) for peer in told]
