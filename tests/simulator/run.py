"""One run: a seed makes a world; requests and faults happen; it is healed and must become idle."""

from dataclasses import dataclass, field
from functools import partial

from kvd.layout.presets import LAYOUTS
from tests.simulator.checks import quiescence, shutdowns, standstills
from tests.simulator.checks.bounds import small_bounds
from tests.simulator.checks.inspector import Inspector, is_told
from tests.simulator.checks.promises import Promise
from tests.simulator.traffic.engines import Router, make_engine
from tests.simulator.traffic.hostile import Hostile
from tests.simulator.traffic.pieces import ON, Piece
from tests.simulator.traffic.schedule import ACTIVE, Schedule
from tests.simulator.virtual.fabric import SimFabric
from tests.simulator.virtual.fleet import Daemon
from tests.simulator.virtual.network import Network
from tests.simulator.virtual.world import World


@dataclass(slots=True)
class Result:
    """What came of one seed."""

    seed: int
    violations: list[str]
    trace_hash: str
    callbacks: int
    sequences: int
    outcomes: dict[str, int] = field(default_factory=dict)
    trace: list[tuple[object, ...]] = field(default_factory=list)


def run_seed(seed: int, *, keep_trace: bool = True, pieces: frozenset[Piece] = ON) -> Result:
    """Runs the world of `seed` and `pieces`; equal arguments give equal results, down to the hash of the trace."""
    world = World(seed, pieces)
    with small_bounds(wanted=Piece.SMALL_BOUNDS in world.pieces):
        router = _run(world)
    return Result(
        seed=seed,
        violations=world.violations,
        trace_hash=world.trace_hash(),
        callbacks=world.loop.callbacks,
        sequences=router.sequences,
        outcomes=router.outcomes,
        trace=world.trace if keep_trace else [],
    )


def _run(world: World) -> Router:
    """Runs a world from its making until it is idle."""
    rng = world.rng
    network, fabric = Network(world), SimFabric(world)
    daemons = [Daemon(world, network, fabric, f"d{number}") for number in range(rng.randint(2, 4))]
    groups, block_tokens = rng.choice((1, 1, 2)), rng.choice((2, 4))
    engines = [
        make_engine(
            world,
            daemons,
            f"e{number}",
            groups=groups,
            layout=rng.choice(sorted(LAYOUTS)),
            block_tokens=block_tokens,
        )
        for number in range(rng.choice((2, 2, 3)))
    ]
    router = Router(world, engines)
    Inspector(world, daemons)
    fabric.is_told = partial(is_told, daemons)
    schedule = Schedule(world, fabric, daemons, router)
    for daemon in daemons:
        daemon.on_stop = partial(shutdowns.check, world)
        if daemon.systemd is not None and not world.pools_end:
            daemon.systemd.in_use = lambda file: any(worker.uses(file) for worker in schedule.workers)
        if Piece.STANDSTILLS in world.pieces:
            daemon.on_start = partial(standstills.watch, world, daemons)
        daemon.start()
    for worker in schedule.workers:
        worker.start()
    if Piece.HOSTILE_PEERS in world.pieces:
        schedule.plan_hostility(Hostile(world, network, daemons))
    schedule.plan()
    try:
        world.loop.run_until(ACTIVE + 0.1)
        schedule.heal()
        quiescence.settle(world, daemons, router)
    except Exception as error:  # noqa: BLE001 - whatever is raised in a world is what the run found
        world.violate(Promise.SOUND, f"{type(error).__name__}: {error}")
        world.crash = error
    return router
