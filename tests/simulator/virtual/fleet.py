"""The daemons of a simulated world: the same actors and the same wiring as the real one, over simulated parts."""

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from prometheus_client import CollectorRegistry

from kvd.actors.build import Dependencies, build_actors
from kvd.actors.gateway.admission import Policy, Rule
from kvd.actors.leases import lease as lease_machine
from kvd.actors.leases.actor import LAST_CALL_SECONDS
from kvd.actors.leases.claim import OfferKey
from kvd.actors.pools.pool import State as PoolState
from kvd.actors.runtime.actor import Actor, OnFailure
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.settings import Settings
from kvd.daemon.shutdown import Part, Parts, Shutdown
from kvd.daemon.systemd import DescriptorStore
from kvd.errors import KvdError
from kvd.memory.interface import NoStore
from kvd.metrics import Metrics
from tests.simulator.checks.promises import Promise
from tests.simulator.traffic.pieces import Piece
from tests.simulator.virtual.asynchronous import AsyncLoop
from tests.simulator.virtual.fabric import SimFabric, make_transport
from tests.simulator.virtual.loop import Process
from tests.simulator.virtual.memory import SimPidfds, SimProvider, SimStamps
from tests.simulator.virtual.network import UID, Network, SimPeerPort, SimWorkerPort
from tests.simulator.virtual.systemd import Systemd
from tests.simulator.virtual.world import World
from tests.support.statuses import process_status

HEARTBEAT = 0.3
CLAIM_TTL = 0.6
CLAIM_WAIT = 0.5
TOMBSTONE = 2.0
POOL_LINGER = 2.0
PEER_IDLE = 1.5
T = TypeVar("T")

_ALLOCATION = 0.01
"""Seconds an allocation takes at most."""
_STOPPING = 0.05
"""Seconds that the transport takes to stop at most."""
_METRICS = Metrics(CollectorRegistry())
"""Shared by all: nothing reads them, and making them takes longer than starting a daemon."""


class Daemon:
    """A named daemon; its runs follow one another."""

    def __init__(
        self, world: World, network: Network, fabric: SimFabric, name: str, rules: tuple[Rule, ...] = ()
    ) -> None:
        self.world = world
        self.name = name
        self.runs = 0
        self.pauses = 0
        self.resumed = -math.inf
        """When it last went on after a pause."""
        self.failure = ""
        self._rules = rules
        self._network = network
        self._fabric = fabric
        self._sessions = 0
        self.on_start: Callable[[Daemon], None] = lambda _daemon: None
        """Called with it when a run has started."""
        self.on_stop: Callable[[Daemon], None] = lambda _daemon: None
        """Called with it when a run has shut down in order, before its process ends."""
        self.systemd = Systemd(world, name) if Piece.STORED_POOLS in world.pieces else None
        self._ended: list[float] = []
        """When each run ended."""
        self._started: list[float] = []
        self.process = Process(world.loop, name)
        self.process.kill()

    @property
    def alive(self) -> bool:
        """Whether a run is up (it may be stopped by SIGSTOP)."""
        return not self.process.dead

    def start(self) -> None:
        """A new run, under a new incarnation."""
        self.runs += 1
        world, name = self.world, self.name
        world.note(name, "starts", self.runs)
        agent = f"{name}#{self.runs}"
        self.process = process = Process(world.loop, agent)
        self._started.append(world.loop.now)
        self.transport = make_transport(agent, self._fabric, process)
        self.peer_port = SimPeerPort(self._network, process, name, agent.encode())
        self.worker_port = SimWorkerPort(self._network, process, name)
        self.incarnation = self._draw_incarnation()
        self._shutdown = Shutdown(lambda: False)
        self.context = ActorContext(
            loop=process,
            settings=Settings(
                daemon=name,
                incarnation=self.incarnation,
                heartbeat=HEARTBEAT,
                retry=0.1,
                claim_ttl=CLAIM_TTL,
                claim_wait=CLAIM_WAIT,
                tombstone=TOMBSTONE,
                attach_wait=0.5,
                pool_linger=POOL_LINGER,
                peer_idle=PEER_IDLE,
                max_quarantined=64,
            ),
            metrics=_METRICS,
            supervisor=self,
            condition=lambda _name, _why: None,
            idle=self._shutdown.is_idle,
        )
        self.draining = False
        provider = SimProvider(
            world.kernel,
            agent,
            map_file=self._map,
            unmap=self._unmap,
            is_full=self._is_full,
        )
        self._mapped: set[int] = set()
        self._stamps = SimStamps(self._fabric.map)
        dependencies = Dependencies(
            worker_port=self.worker_port,
            peer_port=self.peer_port,
            transport=self.transport,
            provider=provider,
            background=self._background,
            pool_background=self._background,
            draw_session=self._draw_session,
            describe=lambda: process_status(name),
            transport_died=self.fail,
            policy=Policy(UID, self._rules),
            stamps=self._stamps,
            store=self._open_store(),
        )
        self.actors = build_actors(self.context, dependencies)
        self.on_start(self)

    def _open_store(self) -> DescriptorStore | NoStore:
        if self.systemd is None:
            return NoStore()
        received, owner = self.systemd.hand_over(self.process.name), self.process.name
        processes = SimPidfds(self.world.kernel, owner, self.world.loop.alive)
        store = DescriptorStore(self.systemd, received, self.world.kernel, processes)
        store.drop_unclaimed_after(self.process, POOL_LINGER)
        return store

    def start_again(self) -> None:
        """Like `start`, unless a run is up."""
        if not self.alive:
            self.start()

    def _draw_incarnation(self) -> int:
        """Of this run: no two have the same, and they lie further apart than a run has leases."""
        runs = self.runs
        if Piece.BACKWARD_CLOCKS in self.world.pieces:
            runs += self.world.rng.randrange(8) << 8
        return runs << 20

    def _is_full(self) -> bool:
        if Piece.CROWDED_HOSTS in self.world.pieces:
            pools = self.actors.pools
            if any(record.state is PoolState.KEPT for record in pools._records.values()):
                return True
        return self.world.chance(self.world.knobs.allocation_fails)

    def _map(self, file: object) -> int:
        base = self._fabric.map_file(file)  # type: ignore[arg-type]
        self._mapped.add(base)
        return base

    def _unmap(self, base: int) -> None:
        self._fabric.unmap_file(base)
        self._mapped.remove(base)

    def _background(self, work: Callable[[], T], done: Callable[[T | KvdError], None]) -> None:
        def run() -> None:
            try:
                result: T | KvdError = work()
            except KvdError as error:
                result = error
            done(result)

        self.process.call_later(self.world.rng.random() * _ALLOCATION, run)

    def _draw_session(self) -> bytes:
        self._sessions += 1
        return f"{self.name}/{self._sessions}".encode().ljust(16, b".")

    def keeps_until(self, run: int, died: float) -> float:
        """Until when a pool that was lent by a run is kept for the successor of a worker that died at `died`.

        A service manager keeps it for the next run, and that for as long as for a worker that died when it started.
        """
        until = died + POOL_LINGER
        for ended, started in zip(self._ended[run - 1 :], self._started[run:], strict=False):
            if self.systemd is None:
                return -math.inf
            if ended >= until:
                break
            until = started + POOL_LINGER
        return until

    # --- ends -------------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """SIGKILL: its reads end, its memory is unmapped, its sockets close. What workers have mapped lives on."""
        if self.process.dead:
            return
        self.world.note(self.name, "crashes")
        self.world.disturb(self.name)
        self.process.kill()
        self._ended.append(self.world.loop.now)
        self._fabric.crash(self.transport.agent, [*sorted(self._mapped), self._stamps.base])
        self.peer_port.close()
        self.worker_port.close()
        self.world.kernel.close_all(self.process.name)

    def drain(self, grace: float) -> None:
        """SIGTERM: accepts nothing new, finishes what runs within `grace`, and ends."""
        self.world.note(self.name, "drains")
        self.world.disturb(self.name)
        self.draining = True
        rng, transport = self.world.rng, self.transport
        stop = Part("the transport", partial(asyncio.to_thread, transport.stop))
        parts = Parts(peers=self.peer_port, workers=self.worker_port, transport=[stop])
        loop = AsyncLoop(self.process, lambda: rng.random() * _STOPPING)
        loop.run(self._shutdown.run(self.actors, parts, grace), self._stopped)
        self.process.call_later(LAST_CALL_SECONDS + _ALLOCATION, self._check_last_call, self.pauses)

    def _check_last_call(self, pauses: int) -> None:
        left = self.standing_offers(claimed=False)
        if self.draining and self.pauses == pauses and left:
            self.world.violate(Promise.ENDS_ONCE, f"{self.name} drains, and holds what nobody claimed: {left}")

    def standing_offers(self, *, claimed: bool = True) -> list[OfferKey]:
        """Offers that have not ended, those that are `claimed` included."""
        leases = self.actors.leases
        standing = [each for each in leases.offers._leases.values() if each.state not in lease_machine.TABLE.final]
        return [lease.key for lease in standing if claimed or not lease.claims]

    def _stopped(self, left: str) -> None:
        if left:
            self.world.violate(Promise.SOUND, f"{self.name} ends without that {left} has stopped")
        self.on_stop(self)
        self.crash()

    def stamps_are_free(self) -> bool:
        """Whether every stamp word is free."""
        leases = self.actors.leases
        return len(leases.offers._stamps._free) == len(self._stamps.words)

    def pause(self) -> None:
        self.world.note(self.name, "pauses")
        self.world.disturb(self.name)
        self.pauses += 1
        self.process.pause()

    def resume(self, *, timers_first: bool = False) -> None:
        self.world.note(self.name, "resumes")
        self.world.disturb(self.name)
        self.pauses += 1
        self.resumed = self.world.loop.now
        self.process.resume(timers_first=timers_first)

    # --- supervision ------------------------------------------------------------------------------------------------

    def failed(self, actor: Actor, message: object, error: Exception) -> None:
        """An actor raised, which it never should; the daemon dies if that is the actor's rule."""
        self.world.violate(Promise.SOUND, f"{actor.name} of {self.name} cannot handle {message!r}: {error!r}")
        if actor.on_failure is OnFailure.STOP:
            self.crash()

    def fail(self, reason: str) -> None:
        self.world.violate(Promise.SOUND, f"{self.name}: {reason}")
        self.crash()
