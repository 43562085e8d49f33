"""The memory of pools: makes it, registers it with the transport, moves it, and gives it back."""

from collections.abc import Callable
from functools import partial

import structlog
from msgspec.structs import replace

from kvd.actors.pools.pool import Event, PoolRecord, State
from kvd.actors.runtime.actor import Actor, Background, Component
from kvd.actors.runtime.context import ActorContext
from kvd.errors import BadRequest, ErrorCode, KvdError, Unavailable, refusal
from kvd.memory.interface import Memory, MemoryProvider, PoolStore
from kvd.transport.interface import Deregistered, Region, Registered, RegisterFailed, Transport

_log = structlog.get_logger("kvd.pools")


class PoolMemory(Component):
    """Calls `up(record)` when a pool is registered, and `step(record, event)` when other things happen."""

    def __init__(
        self,
        actor: Actor,
        context: ActorContext,
        provider: MemoryProvider,
        transport: Transport,
        *,
        background: Background,
        store: PoolStore,
        up: Callable[[PoolRecord], None],
        step: Callable[[PoolRecord, Event], None],
    ) -> None:
        self.actor = actor
        self._context = context
        self._provider = provider
        self._transport = transport
        self._background = background
        self._store = store
        self._up = up
        self._step = step
        self._by_id: dict[int, PoolRecord] = {}

    def make(self, record: PoolRecord) -> None:
        """Adopts the memory that the worker or the last daemon kept, else allocates some; then registers it."""
        self._by_id[record.pool.id] = record
        request = record.request
        if request.descriptor >= 0:
            self._adopt(record, request.descriptor, self._made)
            return
        try:
            stored = self._store.take(request.worker, request.uid, request.raw_spec, request.pid)
        except Unavailable as error:
            self._made(record, error)
            return
        if stored >= 0:
            self._adopt(record, stored, self._taken)
        else:
            self._allocate(record)

    def lent(self, record: PoolRecord) -> None:
        """A pool is about to go to the process of `record.request`: the next daemon must know of it."""
        request = record.request
        self._store.lent(request.worker, request.uid, request.pid)

    def _adopt(
        self, record: PoolRecord, descriptor: int, done: Callable[[PoolRecord, Memory | KvdError], None]
    ) -> None:
        record.preserved = True
        work = partial(self._provider.adopt, descriptor, record.pool.size)
        self._background(work, lambda result: self.actor.call(done, record, result))

    def _allocate(self, record: PoolRecord) -> None:
        record.preserved = False
        work = partial(self._provider.allocate, record.pool.name, record.pool.size)
        self._background(work, lambda result: self.actor.call(self._made, record, result))

    def _taken(self, record: PoolRecord, result: Memory | KvdError) -> None:
        """What was stored may be no pool (any more): freed before its daemon was killed, or another device's."""
        if isinstance(result, BadRequest):
            _log.warning(
                "a stored pool is of no use, its worker gets a new one", pool=record.pool.name, why=result.text
            )
            self._store.drop(record.pool.name)
            self._allocate(record)
        else:
            self._made(record, result)

    def _made(self, record: PoolRecord, result: Memory | KvdError) -> None:
        if isinstance(result, KvdError):
            del self._by_id[record.pool.id]
            record.error = result
            self._step(record, Event.FREED)
            return
        record.memory = result
        request = record.request
        self._store.keep(request.worker, request.uid, request.raw_spec, result.descriptor)
        self._context.metrics.pool_bytes.labels(result.backing).inc(record.pool.size)
        self._register(record)

    def _register(self, record: PoolRecord) -> None:
        memory = record.mapped
        record.pool = replace(record.pool, base=memory.base)
        region = Region(memory.base, memory.size, memory.descriptor, memory.device, memory.length)
        self._transport.register(record.pool.id, region)

    def registered(self, event: Registered) -> None:
        """A pool can be read and written."""
        self._up(self._by_id[event.pool])

    def register_failed(self, event: RegisterFailed) -> None:
        """The memory is of no use here."""
        record = self._by_id[event.pool]
        if record.state is State.RENEWING:
            _log.error("pool lost: it cannot be registered anew", pool=record.pool.name, reason=event.reason)
        text = f"the transport cannot register {record.pool.size} bytes: {event.reason}; check `ulimit -l`"
        record.error = refusal(ErrorCode.TRANSPORT, text)
        self._step(record, Event.UNREGISTERED)

    def deregister(self, record: PoolRecord) -> None:
        """Takes the pool's keys back."""
        self._transport.deregister(record.pool.id, returns=record.state is State.RENEWING)

    def deregistered(self, event: Deregistered) -> None:
        """No peer can reach the memory any more."""
        self._step(self._by_id[event.pool], Event.DEREGISTERED)

    def move(self, record: PoolRecord) -> None:
        """Maps the memory at another address and registers it."""
        self._background(record.mapped.move, lambda result: self.actor.call(self._moved, record, result))

    def _moved(self, record: PoolRecord, error: KvdError | None) -> None:
        if error is not None:
            pool = record.pool.name
            _log.error("a pool keeps its address, so that old keys may read it", pool=pool, reason=error.text)
        self._register(record)

    def close(self, record: PoolRecord) -> None:
        """Unmaps the memory but does not free it: a worker may bring it back."""
        self._release(record, record.mapped.close)

    def free(self, record: PoolRecord) -> None:
        """Gives the memory back."""
        self._release(record, record.mapped.free)

    def _release(self, record: PoolRecord, release: Callable[[], None]) -> None:
        self._background(release, lambda result: self.actor.call(self._released, record, result))

    def _released(self, record: PoolRecord, error: KvdError | None) -> None:
        if error is not None:
            _log.error("memory is not given back", pool=record.pool.name, reason=error.text)
        self._context.metrics.pool_bytes.labels(record.mapped.backing).dec(record.pool.size)
        self._store.drop(record.pool.name)
        del self._by_id[record.pool.id]
        self._step(record, Event.FREED)
