"""The end of a run: a healed world serves fresh requests; once idle, it has nothing left over."""

from tests.simulator.checks.promises import Promise
from tests.simulator.checks.tables import tables
from tests.simulator.traffic.engines import Engine, Router
from tests.simulator.traffic.pieces import Piece
from tests.simulator.traffic.workers import Worker
from tests.simulator.virtual.fabric import parts_of
from tests.simulator.virtual.fleet import CLAIM_WAIT, HEARTBEAT, PEER_IDLE, POOL_LINGER, TOMBSTONE, Daemon
from tests.simulator.virtual.world import World
from tests.support.blocks import offered

_SETTLING = 6.5
"""Seconds after which all earlier requests have ended: the longest offer, the longest deadline with grace."""
_LET_GO = 1.0
"""Seconds within which an offer ends whose pulls were cancelled early: less than it lasts, and than claims do."""
_FRESH = 1.0
"""Seconds that fresh pulls may take in a healed world."""
_QUIET = max(POOL_LINGER, TOMBSTONE, PEER_IDLE + 2 * HEARTBEAT, CLAIM_WAIT) + 1.0
"""Seconds after which nothing may be remembered."""


def settle(world: World, daemons: list[Daemon], router: Router) -> None:
    """Lets a healed world become idle and checks the promises on it."""
    workers = [worker for engine in router.engines for worker in engine.workers if not worker.gone]
    world.loop.run_until(world.loop.now + _SETTLING)
    for worker in workers:
        _check_ended(world, worker)
    _check_cancelled(world, router)
    _check_fresh(world, router)
    world.loop.run_until(world.loop.now + _QUIET)
    for daemon in daemons:
        _check_nothing_left(world, daemon, [worker for worker in workers if worker.daemon is daemon])


def _check_ended(world: World, worker: Worker) -> None:
    if not worker.attached:
        world.violate(Promise.SURVIVES, f"{worker.name} is not attached though all is well")
    for request, pulling in worker.pulls.items():
        if pulling.stray and pulling.trouble != worker.trouble + worker.daemon.pauses:
            continue  # its request may be lost with a session
        world.violate(
            Promise.ENDS_ONCE,
            f"{worker.name}: the pull {request} has not ended (its deadline was {pulling.deadline:.3f})",
        )
    worker.give_up_strays()
    for promise, what in worker.calls.values():
        if worker.trouble == 0 and worker.daemon.runs == 1:
            world.violate(promise, f"{worker.name}: {what} was not refused")
    for group, free in enumerate(worker.free):
        lent = sum(len(part.ids) for each in worker.offers.values() for part in each.blocks if part.group == group)
        if len(free) + lent != worker.cache.spec.groups[group].num_blocks and not worker.pulls:
            world.violate(
                Promise.ENDS_ONCE,
                f"{worker.name}: blocks of group {group} are missing: {len(free)} free, {lent} offered",
            )


def _partners(router: Router, source: Engine) -> list[Engine]:
    """The engines that `source` can prefill for."""
    there = [engine for engine in router.engines if not any(worker.gone for worker in engine.workers)]
    return [engine for engine in there if engine is not source] if source in there else []


def _check_cancelled(world: World, router: Router) -> None:
    """Checks that every pair of engines lets go of what is cancelled early, also before their daemons have met."""
    if Piece.SMALL_BOUNDS in world.pieces:
        return  # claims that are one too many are refused, and then offers end by their time
    for source in router.engines:
        started = [router.begin_cancelled(source, target) for target in _partners(router, source)]
        world.loop.run_until(world.loop.now + _LET_GO)
        for sequence in filter(None, started):
            for worker in source.workers:
                if sequence.offer in worker.offers:
                    what = f"the offer {sequence.offer} stands, and its pulls were cancelled"
                    world.violate(Promise.SOUND, f"{worker.name}: {what}")


def _check_fresh(world: World, router: Router) -> None:
    """Checks that every pair of engines can serve each other again."""
    started = []
    for source in router.engines:
        started += [router.begin(source, target, calm=True) for target in _partners(router, source)]
        world.loop.run_until(world.loop.now + _FRESH)
    for sequence in started:
        if sequence is None or not sequence.served:
            world.violate(
                Promise.SURVIVES, f"a fresh sequence is not pulled in a healed world: {sequence and sequence.name}"
            )


def _check_nothing_left(world: World, daemon: Daemon, workers: list[Worker]) -> None:
    actors = daemon.actors
    for actor in actors.all:
        if actor.waiting:
            world.violate(Promise.SOUND, f"{daemon.name}: {actor.waiting} messages wait for {actor.name}")
    for owner in (*actors.all, actors.peer_server, actors.sessions, *parts_of(daemon.transport), daemon.peer_port):
        for path, table in tables(getattr(owner, "name", type(owner).__name__), owner):
            if table and not (path in _PER_WORKER and len(table) == len(workers)) and path not in _KEPT:
                world.violate(Promise.SOUND, f"{daemon.name}: something is left over in {path}: {table!r}")
    gateway = actors.gateway
    if told := {pool for _, pool in actors.peer_server._told} - {worker.name for worker in workers}:
        world.violate(Promise.SOUND, f"{daemon.name} remembers who was told of {told}, which are gone")
    connections = gateway.connections._by_number
    if (sessions := gateway._admission._sessions.total()) != len(connections):
        world.violate(Promise.SOUND, f"{daemon.name} counts {sessions} sessions of {len(connections)}")
    if not daemon.stamps_are_free():
        world.violate(Promise.SOUND, f"{daemon.name}: stamps of leases that have ended are not free")
    _check_blocks(world, daemon)
    _check_descriptors(world, daemon, workers)


def _check_descriptors(world: World, daemon: Daemon, workers: list[Worker]) -> None:
    held = len(world.kernel.held_by(daemon.process.name))
    if held != len(workers):
        world.violate(Promise.SOUND, f"{daemon.name} holds {held} descriptors, it has {len(workers)} pools")
    if daemon.systemd is not None:
        stored, used = daemon.systemd.files, [worker.file for worker in workers]
        if len(stored) != len(used) or any(file not in used for file in stored):
            numbers = [file.number for file in stored]
            world.violate(Promise.SOUND, f"{daemon.name}: files {numbers} stay stored, it has {len(used)} pools")
    for worker in workers:
        if len(world.kernel.held_by(worker.process.name)) != 1:
            held = len(world.kernel.held_by(worker.process.name))
            world.violate(Promise.SOUND, f"{worker.name} holds {held} descriptors, not one")
        if worker.file is not None and worker.file.writable.any():
            world.violate(Promise.QUARANTINE, f"{worker.name}: a pull's blocks were never freed")


def _check_blocks(world: World, daemon: Daemon) -> None:
    scheduler = daemon.actors.scheduler
    for worker, busy in scheduler._targets.busy_blocks().items():
        if busy:
            world.violate(Promise.QUARANTINE, f"{daemon.name}: {worker} has {busy} busy blocks, and no pull is open")
    for pool in scheduler._targets._pools.values():
        if offered(pool.blocks) or pool.blocks._named:
            world.violate(Promise.SOUND, f"{daemon.name}: blocks of {pool.name} are offered, and no offer stands")
    completion = daemon.actors.completion
    for name, log in completion._logs.items():
        if log.items:
            world.violate(Promise.NOTIFIED, f"{daemon.name}: {name} has not acknowledged {log.items}")
    leases = daemon.actors.leases
    if standing := leases.report().active:
        world.violate(Promise.SOUND, f"{daemon.name}: {standing} leases stand")


_PER_WORKER = {
    "gateway.connections._by_number",
    "gateway._admission._allowances",
    "Sessions._by_worker",
    "Sessions._by_id",
    "pools._records",
    "pools._bounds._records",
    "pools.memory._by_id",
    "PeerServer._pools",
    "leases.offers._pools",
    "scheduler._targets._pools",
    "completion._logs",
}
"""Tables with one entry per attached worker."""
_KEPT = {
    "gateway._admission._attaches._rates": "one of each user that attached lately",
    "gateway._admission._inquiries._rates": "one of each user that asked lately",
    "gateway._admission._sessions": "a number for each user: it is compared with what the gateway has",
    "gateway._admission._once._seen": "culprits that were logged; their number is bounded",
    "leases.claims._answers._once._seen": "the same",
    "scheduler.transfers._refusals._once._seen": "the same",
    "handshake._introductions._reader._known": "those read last; their number is bounded",
    "PeerServer._told": "the pools that somebody was told of: those that are attached, at most",
    "PeerServer._welcomes": "one frame for all that may read the same pools",
    "leases.claims._answers._wrong_proofs._rates": "one of each peer with wrong proofs lately",
    "leases.claims._answers._unknown._rates": "one of each peer whose claims were not known lately",
    "PeerServer._hellos._rates": "one of each peer that said hello lately",
    "SimTransport._pools": "regions, of which the descriptors tell",
    "SimPeerPort._askers": "of the network, not of the daemon",
    "SimPeerPort.answers_to_stranger": "of the network, not of the daemon",
}
"""Other tables that are not empty in an idle world, and why."""
