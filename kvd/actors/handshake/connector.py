"""Connects to the daemons that pulls need, and to those that are expected: some at a time.

To open a link takes 0.15 ms, and a ticket may name a thousand addresses that nobody has heard of.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

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


class _Wanted(NamedTuple):
    address: str
    worker: str
    """Whose pull needs the daemon there; empty if it is expected."""
    at_once: bool
    """Whether a pull waits for it."""


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
        self._wanted: Batch[_Wanted] = Batch(actor, self._connect, lambda _: limits.BATCH_BLOCKS // _AT_ONCE)

    def need(self, address: str, worker: str) -> None:
        """Connects to the daemon that a pull of `worker` needs; the listener's `down` follows if that cannot be."""
        self._wanted.put(_Wanted(address, worker, at_once=True))

    def expect(self, addresses: frozenset[str]) -> None:
        """Connects to these daemons, and those of the last list may be forgotten. Logs those that it cannot meet."""
        for address in sorted(addresses - self.expected):
            self._wanted.put(_Wanted(address, "", at_once=False))
        for address in (self.expected - addresses) & self._peers.by_address.keys():
            self._peers.by_address[address].needed = self._context.loop.time()
        self.expected = addresses

    def _connect(self, some: list[_Wanted]) -> None:
        for wanted in some:
            self.actor.call(self._connect_to, wanted)  # a defect costs the one that met it

    def _connect_to(self, wanted: _Wanted) -> None:
        try:
            peer = self._peers.by_address.get(wanted.address) or self._open(wanted)
        except KvdError as error:
            self._refused(wanted, error)
            return
        if wanted.at_once:
            self._met(wanted.address, wanted.worker)
        else:
            peer.needed = self._context.loop.time()

    def _open(self, wanted: _Wanted) -> Peer:
        self._peers.check_room(wanted.worker)
        link = self._port.connect(wanted.address, wanted.worker)
        now = self._context.loop.time()
        peer = Peer(wanted.address, link, silent_from=now, wanted=wanted.at_once, worker=wanted.worker)
        self._peers.add(peer)
        self._context.metrics.peers.labels(peer.state).inc()
        self._opened(peer)
        return peer

    def _refused(self, wanted: _Wanted, error: KvdError) -> None:
        if wanted.at_once:
            self._listener.down(wanted.address, error.text, restarted=False)
        else:
            _log.warning("expected peer cannot be met", address=wanted.address, reason=error.text)
