"""What happens to a world and when, drawn from the seed.

Each run switches some kinds of faults on and leaves the others out, so that both quiet and rough worlds come up, and
kinds meet in all combinations.
"""

from functools import partial

from kvd.actors.runtime.actor import call
from tests.simulator.traffic.bad_input import BadInput
from tests.simulator.traffic.engines import Router, Sequence
from tests.simulator.traffic.hostile import Hostile
from tests.simulator.traffic.pieces import Piece
from tests.simulator.traffic.workers import Worker
from tests.simulator.virtual.fabric import SimFabric, network_of
from tests.simulator.virtual.fleet import CLAIM_TTL, Daemon
from tests.simulator.virtual.loop import Process
from tests.simulator.virtual.world import World

ACTIVE = 3.0
"""Seconds during which requests are made and faults happen."""
_STRIKE = 0.1
"""Seconds after a pull begins within which a fault hits it."""
_RENEWALS, _RENEWAL = 6, 0.15
"""How often a daemon registers its pools anew in a row, and the seconds between, at most."""
_JOINTLY = 0.02
"""Seconds within which processes end that end together."""
_STANDSTILL = 2.0
"""Seconds for which a daemon is stopped, at most."""
_LAPSE = 1.5 * CLAIM_TTL
"""Seconds for which all stand still in the middle of a pull, at most."""
_SOON = 0.01
"""Seconds after which a name that was withdrawn is offered again: its engine has heard that it may, as a rule."""


class Schedule:
    """Draws and carries out the events of one run."""

    def __init__(self, world: World, fabric: SimFabric, daemons: list[Daemon], router: Router) -> None:
        self.world = world
        self.fabric = fabric
        self.daemons = daemons
        self.router = router
        self.workers = [worker for engine in router.engines for worker in engine.workers]
        self._bad_input = BadInput(world, daemons, self.workers)
        router.on_pull = self._strike
        world.on_death = self._kill_agent
        world.on_transport_death = self._kill_transport
        self._set_knobs()

    def _set_knobs(self) -> None:
        rng, knobs = self.world.rng, self.world.knobs
        for knob, likely, most in (
            ("drop", 0.5, 0.2),
            ("duplicate", 0.4, 0.3),
            ("delay", 0.4, 0.2),
            ("read_fails", 0.3, 0.3),
            ("read_slow", 0.4, 0.7),
            ("read_sticks", 0.4, 0.4),
            ("add_peer_fails", 0.15, 0.3),
            ("strike", 0.6, 0.5),
            ("forge", 0.4, 0.3),
            ("queue_full", 0.15, 0.2),
            ("allocation_fails", 0.1, 0.3),
            ("registration_fails", 0.1, 0.3),
        ):
            if rng.random() < likely:
                setattr(knobs, knob, rng.random() ** 2 * most)

        if Piece.REUSED_NAMES in self.world.pieces:
            knobs.reuse = 0.2
        if Piece.BRIEF_OFFERS in self.world.pieces and rng.random() < 0.6:
            knobs.clear()
            knobs.read_slow = 0.5
        if Piece.CHANGING_PATHS in self.world.pieces:
            knobs.die_while_read = 0.08
        if Piece.DYING_TRANSPORTS in self.world.pieces:
            knobs.transport_dies = 0.1
        if Piece.STANDSTILLS in self.world.pieces:
            if rng.random() < 0.5:
                knobs.clear()
                knobs.read_slow = 0.5
            knobs.stand_still = 0.3
        self.world.orderly = knobs.duplicate == knobs.delay == 0.0
        self.world.queues_fill = knobs.queue_full > 0.0
        crowded = Piece.CROWDED_HOSTS in self.world.pieces
        self.world.pools_end = crowded or knobs.registration_fails > 0.0 or knobs.allocation_fails > 0.0

    def plan(self) -> None:
        rng = self.world.rng
        kinds = (
            (self._sequence, 1.0, 14),
            (self._partition, 0.3, 3),
            (self._crash_daemon, 0.35, 2),
            (self._drain_daemon, 0.15, 1),
            (self._pause_daemon, 0.25, 2),
            (self._crash_worker, 0.35, 3),
            (self._pause_worker, 0.2, 2),
            (self._vanish, 0.5, 1),
            (self._lose_session, 0.3, 3),
            (self._detach_worker, 0.2, 2),
            (self._cancel, 0.5, 6),
            (self._withdraw, 0.5, 6),
            (self.router.pull_again, 0.5, 8),
            (self._bad_input.do, 0.5, 20),
            *([(self._linger, 1.0, 3)] if Piece.LINGERING_PROCESSES in self.world.pieces else []),
            *([(self._stand_still, 1.0, 3)] if Piece.STANDSTILLS in self.world.pieces else []),
            *([(self._lose_transport, 1.0, 4)] if Piece.DYING_TRANSPORTS in self.world.pieces else []),
            *([(self._renew, 0.5, 1)] if Piece.TWO_ADDRESSES in self.world.pieces else []),
            *([(self._restart_jointly, 1.0, 2)] if Piece.STORED_POOLS in self.world.pieces else []),
        )
        for action, likely, most in kinds:
            if rng.random() < likely:
                for _ in range(rng.randint(1, most)):
                    self.world.loop.call_later(0.05 + rng.random() * ACTIVE, action)
        if Piece.IDLE_PROCESSES in self.world.pieces:
            self.world.loop.call_later(0.2 + rng.random() * 0.3, self._idle)

    def plan_hostility(self, hostile: Hostile) -> None:
        """Has hostile peers send something now and then."""
        for _ in range(self.world.rng.randint(1, 30)):
            self.world.loop.call_later(self.world.rng.random() * ACTIVE, hostile.do)

    def heal(self) -> None:
        """Ends all faults and starts all that are down."""
        world = self.world
        world.note("world", "healed")
        world.knobs.clear()
        world.cut.clear()
        self.fabric.heal()
        for seconds in range(4):
            world.loop.call_later(seconds, self.fabric.let_go)  # those that were slow on their way to getting stuck
        for daemon in self.daemons:
            if daemon.process.paused:
                daemon.resume()
            daemon.start_again()
            network_of(daemon.transport).gain_process()
        for worker in self.workers:
            for process in list(worker.lingering):
                process.kill()
            if worker.process.paused:
                worker.resume()
            worker.start_again()

    # --- what happens -----------------------------------------------------------------------------------------------

    def _sequence(self) -> None:
        rng = self.world.rng
        source, target = rng.sample(self.router.engines, 2)
        self.router.begin(source, target, calm=rng.random() < 0.4)

    def _daemon(self) -> Daemon:
        return self.world.rng.choice(self.daemons)

    def _worker(self) -> Worker:
        return self.world.rng.choice(self.workers)

    def _partition(self) -> None:
        if len(self.daemons) < 2:
            return
        world = self.world
        one, other = world.rng.sample(self.daemons, 2)
        pairs = {(one.name, other.name)}
        if world.rng.random() < 0.6:
            pairs.add((other.name, one.name))
        world.note("world", "cut", sorted(pairs))
        world.disturb(one.name, other.name)
        world.cut |= pairs
        bytes_too = one.alive and other.alive and world.rng.random() < 0.5
        agents = (one.transport.agent, other.transport.agent)
        if bytes_too:
            self.fabric.cut(*agents)

        def mend() -> None:
            world.note("world", "mended", sorted(pairs))
            world.disturb(one.name, other.name)
            world.cut -= pairs
            if bytes_too:
                self.fabric.mend(*agents)

        world.loop.call_later(world.rng.random() * 2.0, mend)

    def _cut(self, pair: tuple[str, str], seconds: float) -> None:
        """Cuts one direction, for messages only."""
        world = self.world
        world.note("world", "cut", pair)
        world.disturb(*pair)
        world.cut.add(pair)
        world.loop.call_later(seconds, world.cut.discard, pair)

    def _crash_daemon(self) -> None:
        self._crash(self._daemon())

    def _crash(self, daemon: Daemon) -> None:
        if daemon.alive:
            daemon.crash()
            self._restart_later(daemon)

    def _kill_transport(self, agent: str) -> None:
        for daemon in self.daemons:
            if daemon.transport.agent == agent:
                self._end_transport(daemon)

    def _lose_transport(self) -> None:
        self._end_transport(self._daemon())

    def _end_transport(self, daemon: Daemon) -> None:
        world, network = self.world, network_of(daemon.transport)
        if daemon.alive and not network.down:
            world.note(daemon.name, "transport killed")
            names = [each.name for each in self.daemons]
            world.disturb(*names)
            network.lose_process()

            def end() -> None:
                world.disturb(*names)  # as at the end of a partition: until now no peer could be added or read from
                network.gain_process()

            world.loop.call_later(0.01 + world.rng.random(), end)

    def _kill_agent(self, agent: str) -> None:
        for daemon in self.daemons:
            if daemon.transport.agent == agent:
                self._crash(daemon)

    def _restart_jointly(self) -> None:
        """A daemon and all its workers end at about the same time, and others follow them."""
        daemon, rng = self._daemon(), self.world.rng
        self.world.loop.call_later(rng.random() * _JOINTLY, self._crash, daemon)
        for worker in self.workers:
            if worker.daemon is daemon:
                self.world.loop.call_later(rng.random() * _JOINTLY, self._kill, worker)

    def _restart_later(self, daemon: Daemon) -> None:
        self.world.loop.call_later(0.02 + self.world.rng.random(), daemon.start_again)

    def _drain_daemon(self) -> None:
        daemon = self._daemon()
        if daemon.alive and not daemon.process.paused:
            grace = self.world.rng.random() * 1.5
            daemon.drain(grace)
            self.world.loop.call_later(grace + 0.1, self._restart_when_gone, daemon, daemon.process)

    def _restart_when_gone(self, daemon: Daemon, process: Process) -> None:
        """If SIGSTOP stops it while it drains, it ends after its grace is over."""
        if process.dead:
            self._restart_later(daemon)
        else:
            self.world.loop.call_later(0.1, self._restart_when_gone, daemon, process)

    def _pause_daemon(self) -> None:
        self._pause(self._daemon())

    def _pause(self, daemon: Daemon, *, timers_first: bool = False) -> None:
        if daemon.alive and not daemon.process.paused:
            daemon.pause()
            process = daemon.process

            def resume() -> None:
                if process.paused and daemon.process is process:
                    daemon.resume(timers_first=timers_first)

            self.world.loop.call_later(self.world.rng.random() * _STANDSTILL, resume)

    def _stand_still(self) -> None:
        """Alone, or with all the world: then it is nobody's fault, and costs nothing but time."""
        rng = self.world.rng
        if rng.random() < 0.5:
            self.world.stand_still(rng.random() * _STANDSTILL)
        else:
            self._pause(self._daemon(), timers_first=True)

    def _crash_worker(self) -> None:
        self._kill(self._worker())

    def _vanish(self) -> None:
        if Piece.VANISHING_WORKERS in self.world.pieces:
            worker = self._worker()
            worker.gone = True
            worker.crash()

    def _linger(self) -> None:
        worker = self._worker()
        if worker.attached and worker.process.visible:
            worker.linger(self.world.rng.random())
            self.world.loop.call_later(0.005, worker.start_again)

    def _idle(self) -> None:
        worker = self._worker()
        if worker.attached and worker.process.visible:
            self._hang_up(worker)
            worker.pause()  # until the world is healed

    def _renew(self) -> None:
        """A daemon registers its pools anew again and again, while they are pulled from by both its addresses."""
        rng, loop = self.world.rng, self.world.loop
        source, target = rng.sample(self.router.engines, 2)
        for number in range(_RENEWALS):
            at = number * _RENEWAL
            loop.call_later(at, self._renew_pools, rng.choice(source.workers).daemon)
            for _ in range(5):
                again = partial(self.router.begin, source, target, calm=False)
                loop.call_later(at + rng.random() * _RENEWAL / 3, again)

    def _renew_pools(self, daemon: Daemon) -> None:
        """One after the other, so that each lies where another has been."""
        here = [worker for worker in self.workers if worker.daemon is daemon and worker.attached]
        for number, worker in enumerate(self.world.rng.sample(here, len(here))):
            self.world.disturb(worker.daemon.name, worker.name)
            renew = partial(call, daemon.actors.pools.renew, worker.name)
            self.world.loop.call_later(number * _RENEWAL / 8, renew)

    def _kill(self, worker: Worker) -> None:
        if worker.alive:
            worker.crash()
            self.world.loop.call_later(0.005 + self.world.rng.random() * 0.5, worker.start_again)

    def _kill_twice(self, worker: Worker) -> None:
        if not worker.alive:
            return
        worker.crash()
        worker.start_again()

        def kill_again() -> None:
            if worker.alive and not worker.attached:
                self._kill(worker)

        self.world.loop.call_later(0.01 + self.world.rng.random() * 0.1, kill_again)

    def _pause_worker(self) -> None:
        worker = self._worker()
        if worker.alive and not worker.process.paused:
            worker.pause()
            process = worker.process

            def resume() -> None:
                if process.paused and worker.process is process:
                    worker.resume()

            self.world.loop.call_later(self.world.rng.random(), resume)

    def _lose_session(self) -> None:
        self._hang_up(self._worker())

    def _hang_up(self, worker: Worker) -> None:
        if worker.alive and worker.session is not None:
            self.world.note(worker.name, "loses its session")
            worker.session.hang_up(lose=self.world.rng.random() < 0.5)

    def _detach_worker(self) -> None:
        worker = self._worker()
        if worker.attached:
            worker.detach()

    def _cancel(self) -> None:
        worker = self._worker()
        if worker.attached and worker.pulls:
            worker.cancel(self.world.rng.choice(sorted(worker.pulls)))

    def _withdraw(self) -> None:
        worker = self._worker()
        if worker.attached and worker.offers:
            self.router.withdraw(self.world.rng.choice(sorted(worker.offers)), worker)

    def _withdraw_from(self, sequence: Sequence, source: Worker) -> None:
        if source.attached and sequence.offer in source.offers:
            self.router.withdraw(sequence.offer, source)

    def _offer_again(self, sequence: Sequence, source: Worker) -> None:
        """Withdraws an offer and makes another of its name, while the first is read."""
        self._withdraw_from(sequence, source)
        self.world.loop.call_later(_SOON, self.router.begin_again, sequence)

    def _strike(self, sequence: Sequence, worker: Worker, request: str) -> None:
        """Does something in the middle of a pull."""
        world = self.world
        source = world.rng.choice(sequence.source.workers)
        if world.chance(world.knobs.forge):
            self._bad_input.forge(source, sequence.offer, self._worker())
        if world.chance(world.knobs.reuse):
            world.loop.call_later(world.rng.random() * _SOON, self._offer_again, sequence, source)
        if world.chance(world.knobs.stand_still):
            world.loop.call_later(world.rng.random() * _STRIKE, world.stand_still, world.rng.random() * _LAPSE)
        if not world.chance(world.knobs.strike):
            return

        def cancel() -> None:
            if worker.attached and request in worker.pulls:
                worker.cancel(request)

        def withdraw_unheard() -> None:
            # The consumer does not hear that its claim is broken; only the fence can tell it.
            self._cut((source.daemon.name, worker.daemon.name), world.rng.random())
            withdraw()

        def withdraw() -> None:
            self._withdraw_from(sequence, source)

        if Piece.DYING_SUCCESSORS in world.pieces and world.rng.random() < 0.5:
            world.loop.call_later(world.rng.random() ** 2 * _STRIKE, self._kill_twice, source)
            return
        action = world.rng.choice(
            (
                cancel,
                withdraw,
                withdraw_unheard,
                partial(self._kill, source),
                partial(self._kill, worker),
                partial(self._crash, source.daemon),
                partial(self._crash, worker.daemon),
                partial(self._pause, source.daemon),
                partial(self._pause, worker.daemon),
                partial(self._hang_up, worker),
            )
        )
        world.loop.call_later(world.rng.random() ** 2 * _STRIKE, action)
