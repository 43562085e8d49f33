"""Nobody is declared dead because of one's own standstill."""

from kvd.actors.handshake.peer import MISSED_BEATS, Peer
from kvd.actors.handshake.peer_table import Event
from kvd.actors.leases.claim import ClaimKey
from tests.simulator.checks.promises import Promise
from tests.simulator.virtual.fleet import HEARTBEAT, Daemon
from tests.simulator.virtual.world import World

_SINCE = (MISSED_BEATS + 2) * HEARTBEAT + 2.0
"""Seconds before a loss within which its cause lies, if the daemon did not stand still for longer than 2 s."""
_WAY = 0.002
"""Seconds that a message takes at most if it is not delayed."""


def watch(world: World, daemons: list[Daemon], daemon: Daemon) -> None:
    """Looks at every peer that this run of `daemon` gives up on as silent, and keeps claims out of a race."""
    handshake = daemon.actors.handshake
    lose = handshake._lose

    def watched(peer: Peer, event: Event, reason: str, *, noted: bool = False) -> None:
        if event is Event.SILENT and reason.startswith("no answer"):
            _check(world, daemons, daemon, peer)
        lose(peer, event, reason, noted=noted)

    handshake._lose = watched  # type: ignore[method-assign]
    due = daemon.actors.leases.claims._due
    expired = due._expired

    def later(key: ClaimKey) -> None:
        now = world.loop.now
        if any(end < now <= end + _WAY for _, end in world.standstills):
            # Its time ends as usual, and all the world has just stood still as the renewal was due: it is on its way.
            due.set(key, now + _WAY)
        else:
            expired(key)

    due._expired = later


def _check(world: World, daemons: list[Daemon], daemon: Daemon, peer: Peer) -> None:
    """A peer that is up, ran all the time and was never cut off has answered."""
    other = next((each for each in daemons if peer.address.startswith(each.peer_port.address)), None)
    if other is None or not other.alive or other.process.paused:
        return
    cut = {(daemon.name, other.name), (other.name, daemon.name)} & world.cut
    if not cut and not world.faults_since(world.loop.now - _SINCE, other.name):
        world.violate(Promise.SURVIVES, f"{daemon.name} gives up on {other.name}, which answered all the time")
