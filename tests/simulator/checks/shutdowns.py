"""A daemon that ends in order has answered everything before its sockets close."""

from kvd.actors.scheduler.pull import State
from tests.simulator.checks.promises import Promise
from tests.simulator.virtual.fleet import Daemon
from tests.simulator.virtual.world import World

_CONCLUDED = frozenset({State.DONE, State.FAILED, State.FAILING, State.CANCELLED, State.CANCELLING})


def check(world: World, daemon: Daemon) -> None:
    """Each pull and each offer has an outcome, and it was sent to whoever is connected."""
    scheduler, completion = daemon.actors.scheduler, daemon.actors.completion
    if left := [pull.key for pull in scheduler._pulls.values() if pull.state not in _CONCLUDED]:
        world.violate(Promise.ENDS_ONCE, f"{daemon.name} ends without an outcome of {left}")
    if standing := daemon.standing_offers():
        world.violate(Promise.ENDS_ONCE, f"{daemon.name} ends without an end of {standing}")
    for name, log in completion._logs.items():
        session = completion._sessions._by_worker.get(name)
        # A worker that has just been attached connects its socket for requests a moment later.
        connected = log.connected and session is not None and session.id in daemon.worker_port.routes
        if connected and log.sent < len(log.items) and not world.queues_fill:
            world.violate(Promise.NOTIFIED, f"{daemon.name} ends, and has not sent {name} what it has for it")
