"""Checks now and then that no daemon holds a claim that no consumer wants, or writes to what it holds for others."""

from array import array

from kvd import limits
from kvd.actors.leases import lease as lease_machine
from kvd.actors.leases.claim import State
from kvd.actors.pools.pool import State as PoolState
from kvd.actors.runtime.pools import Pool
from kvd.protocol.types import Spans
from kvd.transport.interface import ReadRequest
from tests.simulator.checks.bounds import over
from tests.simulator.checks.promises import Promise
from tests.simulator.traffic.pieces import Piece
from tests.simulator.virtual.fleet import CLAIM_TTL, Daemon
from tests.simulator.virtual.world import World

_EVERY = 0.12
"""Seconds between two looks; an unwanted claim lasts several of them."""
_CATCHING_UP = limits.CATCH_UP_SECONDS + CLAIM_TTL
"""Seconds for which a claim that nobody wants is held after a standstill."""
_LOOKS = 3
"""How often in a row a claim may be seen without its transfer, since its release takes a moment to arrive."""


def check_offered(world: World, daemon: Daemon) -> None:
    """No pull that is open may write to blocks that stand in an offer."""
    leases, scheduler = daemon.actors.leases, daemon.actors.scheduler
    standing = [lease for lease in leases.offers._leases.values() if lease.state not in lease_machine.TABLE.final]
    for pull in scheduler._pulls.values():
        written = blocks_of(pull.pool, pull.blocks)
        for lease in standing:
            both = written & blocks_of(lease.pool, lease.content.blocks) if lease.pool.id == pull.pool.id else set()
            if both:
                text = f"{daemon.name}: {pull.key} writes to {sorted(both)}, which stand in {lease.key}"
                world.violate(Promise.FENCED, text)


def blocks_of(pool: Pool, spans: Spans) -> set[tuple[int, int]]:
    """Blocks as (arena, id)."""
    return {(pool.spec.groups[span.group].arena, block) for span in spans for block in array("I", span.ids)}


def is_told(daemons: list[Daemon], reader: str, request: ReadRequest) -> bool:
    """Whether a reader knows the pool that it reads from as it stands now: its epoch, and where it is."""
    by_agent = {daemon.transport.agent: daemon for daemon in daemons if daemon.alive}
    here, there = by_agent.get(reader), by_agent.get(request.agent)
    if here is None or there is None:
        return False
    scheduler, leases = here.actors.scheduler, there.actors.leases
    transfer = scheduler.transfers._open[request.read]
    pool, known = leases.offers._pools.get(transfer.rank.pool), transfer.source.pool
    return pool is not None and (pool.epoch, pool.base) == (known.epoch, request.remote_base)


def check_stored(world: World, daemon: Daemon) -> None:
    """Every pool that a worker has is stored for the daemon's next run."""
    pools = daemon.actors.pools
    if daemon.systemd is None:
        return
    for record in pools._records.values():
        if record.state is PoolState.LENT and world.kernel.file(record.mapped.descriptor) not in daemon.systemd.files:
            world.violate(Promise.SURVIVES, f"{daemon.name}: the pool of {record.pool.name} is not stored")


class Inspector:
    def __init__(self, world: World, daemons: list[Daemon]) -> None:
        self._world = world
        self._daemons = daemons
        self._seen: dict[tuple[str, int], int] = {}
        self._by_agent: dict[bytes, Daemon] = {}
        self._look()

    def _look(self) -> None:
        self._by_agent = {daemon.peer_port.agent: daemon for daemon in self._daemons if daemon.alive}
        for daemon in self._by_agent.values():
            check_offered(self._world, daemon)
            check_stored(self._world, daemon)
        # Where clocks step back a consumer may claim of a run that it has not met, and forget that with the one before.
        if self._world.orderly and Piece.BACKWARD_CLOCKS not in self._world.pieces:
            self._find_claims_for_nobody()
        if Piece.SMALL_BOUNDS in self._world.pieces:
            self._find_full_tables()
        self._world.loop.call_later(_EVERY, self._look)

    def _find_full_tables(self) -> None:
        for daemon in self._daemons:
            for text in over(daemon.actors) if daemon.alive else ():
                self._world.violate(Promise.SOUND, f"{daemon.name}: {text}")

    def _find_claims_for_nobody(self) -> None:
        """A consumer that ends a transfer tells the producer, so that the claim need not expire."""
        seen: dict[tuple[str, int], int] = {}
        for daemon in self._daemons:
            if not daemon.alive:
                continue
            leases = daemon.actors.leases
            for key in [record.key for record in leases.claims._records.values() if record.state is State.HELD]:
                consumer = self._by_agent.get(key.sender.rpartition(b"#")[0])
                if consumer is not None and not self._wants(consumer, key.claim, daemon):
                    known = (f"{daemon.name} {key.sender!r}", key.claim)
                    seen[known] = looks = self._seen.get(known, 0) + 1
                    if looks > _LOOKS:
                        self._world.violate(Promise.SOUND, f"{daemon.name} holds a lease for {key}, who is over it")
        self._seen = seen

    def _wants(self, consumer: Daemon, claim: int, producer: Daemon) -> bool:
        scheduler = consumer.actors.scheduler
        since = self._world.loop.now - (_LOOKS + 2) * _EVERY
        quiet = not any(self._world.faults_since(since, name) for name in (consumer.name, producer.name))
        stopped = consumer.process.paused or producer.process.paused
        stopped |= producer.resumed >= since - _CATCHING_UP or self._world.stood_still(since - _CATCHING_UP)
        return not quiet or stopped or claim in scheduler.transfers._open
