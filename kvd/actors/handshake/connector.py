"""Connects to the daemons that pulls need, and to those that are expected: some at a time.

To open a link takes 0.15 ms, and a ticket may name a thousand addresses that nobody has heard of.
"""

from collections.abc import Callable
from itertools import islice
from typing import Final

import structlog

from kvd import limits
from kvd.actors.handshake.peer import Peer
from kvd.actors.handshake.peers import PeerListener, Peers
from kvd.actors.runtime.actor import Actor, Component
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.deferred import Batch
from kvd.errors import KvdError
from kvd.net.interface import PeerPort

_log = structlog.get_logger("kvd.handshake")

_AT_ONCE: Final = 16
"""Links that are opened before sockets are read again."""


_EXPECTED: Final = ""
"""In place of a worker's name."""


class Connector(Component):
    """Calls `opened` with each new peer, and `met(address, worker)` once the peer is known that a pull needs."""

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
        self._wanted: dict[str, dict[str, None]] = {}
        """Addresses in order, by the worker whose pulls need the daemons there."""
        self._refused: dict[str, dict[str, str]] = {}
        """Why not, of addresses by worker."""
        self._turns: Batch[str] = Batch(actor, self._connect, lambda _: limits.BATCH_BLOCKS)
        """One worker at a time: it may make up addresses faster than links can be opened."""

    def need(self, address: str, worker: str) -> None:
        """Connects to the daemon that a pull of `worker` needs; the listener's `refused` follows if that cannot be."""
        waiting = self._wanted.get(worker, {})
        if address in waiting:
            self._turns.put(worker)  # it has none if a defect has ended its last one
            return
        try:
            self._peers.check_room(worker, len(waiting))
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
                _log.warning("expected peer cannot be met", address=address, reason=error.text)
            else:
                self._refuse(address, worker, error)
            return
        if worker == _EXPECTED:
            peer.needed = self._context.loop.time()
        else:
            self._met(address, worker)

    def _open(self, address: str, worker: str) -> Peer:
        self._peers.check_room(worker)
        link = self._port.connect(address, worker)
        now = self._context.loop.time()
        wanted_by = {} if worker == _EXPECTED else {worker: None}
        peer = Peer(address, link, silent_from=now, wanted_by=wanted_by, worker=worker)
        self._peers.add(peer)
        self._context.metrics.peers.labels(peer.state).inc()
        self._opened(peer)
        return peer
