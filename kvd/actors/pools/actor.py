"""Pools: allocates them, has them registered, lends them to workers and takes them back.

A pool's life: allocated (or adopted from a worker that kept it while another daemon served), registered, lent. When its
worker is gone the pool is kept for a successor; a successor gets it when it is quiet, so that leases and open reads of
the predecessor bind it too: it cannot write to memory that it has not got.

Whoever has a pool's keys can read it for as long as it is registered, with no word to anybody. So when somebody who has
them is not trusted any more, the pool is made quiet by force, registered anew, and mapped at another address: some
fabrics check no keys, and there zeros lie at the old one.
"""

import structlog
from msgspec import Struct

from kvd import limits
from kvd.actors.completion.messages import Forget
from kvd.actors.gateway.messages import AttachRefused, PoolLent, PoolRenewed, PoolReturned, Reported
from kvd.actors.pools.messages import AttachPool, DetachPool, Quiesced, RenewPool, WorkerGone
from kvd.actors.pools.record import PoolRecord, PoolState
from kvd.actors.runtime.actor import Actor, handles
from kvd.actors.runtime.background import Background
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.deadlines import Deadlines
from kvd.actors.runtime.messages import Pool, PoolDown, PoolUp, Quiesce, Report
from kvd.errors import BadRequest, ErrorCode, InternalError, KvdError, Unavailable
from kvd.layout import CacheSpec
from kvd.memory.interface import Memory, MemoryProvider, PoolStore
from kvd.transport.interface import Deregistered, Registered, RegisterFailed, Transport

_log = structlog.get_logger("kvd.pools")


class _Made(Struct, frozen=True):
    worker: str
    result: Memory | KvdError


class _Moved(Struct, frozen=True):
    worker: str
    result: Memory | KvdError


class _Released(Struct, frozen=True):
    worker: str
    result: KvdError | None
    refusal: KvdError | None


class _Overdue(Struct, frozen=True, gc=False):
    worker: str


class PoolsActor(Actor):
    """See the module's text. A failure stops the daemon: a pool in a wrong state is memory that somebody writes to."""

    name = "pools"

    def __init__(
        self,
        context: ActorContext,
        provider: MemoryProvider,
        transport: Transport,
        background: Background,
        store: PoolStore,
    ) -> None:
        super().__init__(context.dispatcher)
        self._context = context
        self._provider = provider
        self._transport = transport
        self._background = background
        self._store = store
        self._records: dict[str, PoolRecord] = {}
        self._last_id = 0
        self._patience: Deadlines[str] = Deadlines(context.loop, lambda worker: self.tell(_Overdue(worker)))

    # --- attaching --------------------------------------------------------------------------------------------------

    @handles(AttachPool)
    def attach(self, request: AttachPool) -> None:
        """Lends the worker its pool, at once, after making it, or after its predecessor's transfers ended."""
        record = self._records.get(request.worker)
        if record is None:
            self._make(request)
        elif request.uid != record.request.uid:
            self._refuse(request, record.of_another(request.uid))
        elif record.state is PoolState.KEPT and request.instance == record.request.instance and record.suits(request):
            self._close_descriptor(request)
            record.request, record.kept = request, True
            self._lend(record)
        elif record.state is not PoolState.KEPT:
            self._refuse(request, record.busy())
        elif (refusal := self._above_bounds(request)) is not None:
            self._refuse(request, refusal)  # and its predecessor's pool is not ended for it
        else:
            self._quieten(record, successor=request)

    def _above_bounds(self, request: AttachPool) -> KvdError | None:
        """Why this user may not have a pool of that size, beside its others; None where it may."""
        if request.worker not in self._records and len(self._records) >= limits.MAX_POOLS:
            return Unavailable(ErrorCode.OVERLOADED, f"there are {limits.MAX_POOLS} pools already")
        pools = [record.pool for record in self._records.values() if record.request.uid == request.uid]
        others = [self._provider.footprint(pool.size) for pool in pools if pool.worker != request.worker]
        size, held = self._provider.footprint(request.spec.pool_bytes), sum(others)
        if len(others) >= limits.MAX_POOLS_PER_USER:
            text = f"user {request.uid} has {len(others)} other pools, the bound; detach one, or wait for `pool_linger`"
            return Unavailable(ErrorCode.OVERLOADED, text)
        if request.quota is None or held + size <= request.quota:
            return None
        text = (
            f"{size} bytes for {request.worker!r} and {held} in other pools of user {request.uid} are above its quota "
            f"of {request.quota}; detach another pool, or raise `max_bytes` in the daemon's `worker_policy`"
        )
        return BadRequest(ErrorCode.NOT_PERMITTED, text)

    def _make(self, request: AttachPool) -> None:
        refusal = self._above_bounds(request)
        if refusal is not None:
            self._refuse(request, refusal)
            return
        self._last_id += 1
        size = request.spec.pool_bytes
        pool = Pool(self._last_id, request.worker, self._last_id, 0, size, request.spec, request.raw_spec)
        descriptor = request.descriptor
        if descriptor < 0:
            descriptor = self._store.take(request.worker, request.uid, request.raw_spec)
        self._records[request.worker] = PoolRecord(pool, PoolState.MAKING, request, self._last_id, kept=descriptor >= 0)

        def work() -> Memory:
            if descriptor >= 0:
                return self._provider.adopt(descriptor, request.spec.pool_bytes)
            return self._provider.allocate(request.worker, request.spec.pool_bytes)

        self._background(work, lambda result: self.tell(_Made(request.worker, result)))

    @handles(_Made)
    def made(self, message: _Made) -> None:
        """The memory is there, or cannot be had."""
        record = self._records[message.worker]
        if isinstance(message.result, KvdError):
            del self._records[message.worker]
            self._context.gateway.tell(AttachRefused(record.request.connection, message.result))
            return
        record.memory = message.result
        request = record.request
        self._store.keep(request.worker, request.uid, request.raw_spec, message.result.descriptor)
        self._context.metrics.pool_bytes.labels(message.result.backing).inc(record.pool.size)
        self._register(record, record.pool.spec, record.pool.raw_spec)

    def _register(self, record: PoolRecord, spec: CacheSpec, raw_spec: bytes) -> None:
        memory = record.memory
        assert memory is not None  # noqa: S101 - a record is registered only after it was made
        record.state = PoolState.MAKING
        old = record.pool
        record.pool = Pool(old.id, old.worker, old.epoch, memory.base, memory.size, spec, raw_spec)
        self._transport.register(old.id, memory.base, memory.size)

    @handles(Registered)
    def registered(self, event: Registered) -> None:
        """Tells everybody that the pool is up, and its worker that it may have it."""
        record = self._by_id(event.pool)
        for actor in (self._context.handshake, self._context.leases, self._context.scheduler):
            actor.tell(PoolUp(record.pool, event.metadata))
        if record.renewing:
            self._renewed(record)
        else:
            self._lend(record)

    @handles(RegisterFailed)
    def register_failed(self, event: RegisterFailed) -> None:
        """The transport will not have the memory."""
        record = self._by_id(event.pool)
        text = f"the transport cannot register {record.pool.size} bytes: {event.reason}; check `ulimit -l`"
        if record.renewing:
            _log.error("pool lost: it cannot be registered anew", pool=record.pool.worker, reason=event.reason)
        self._release(record, Unavailable(ErrorCode.TRANSPORT, text))

    def _lend(self, record: PoolRecord) -> None:
        memory = record.memory
        assert memory is not None  # noqa: S101 - only made records are lent
        record.state, record.lent = PoolState.LENT, True
        self._patience.unset(record.pool.worker)
        self._context.gateway.tell(
            PoolLent(
                connection=record.request.connection,
                pool=record.pool,
                descriptor=memory.descriptor,
                backing=memory.backing,
                kept=record.kept,
                tenancy=record.tenancy,
            )
        )
        record.kept = True  # for whoever attaches next

    # --- giving back ------------------------------------------------------------------------------------------------

    @handles(DetachPool)
    def detach(self, message: DetachPool) -> None:
        """Ends the pool once it is quiet."""
        record = self._records.get(message.worker)
        if record is None:
            return  # it was lost meanwhile, and its worker has been told
        record.detaching, record.lent = message.connection, False
        if record.state in (PoolState.LENT, PoolState.QUIETING):
            self._quieten(record)

    @handles(WorkerGone)
    def worker_gone(self, message: WorkerGone) -> None:
        """Keeps the pool for a successor, for a while: what peers read from it and what is read into it goes on."""
        record = self._records.get(message.worker)
        if record is None:
            return
        if record.successor is not None and record.successor.connection == message.connection:
            self._close_descriptor(record.successor)
            record.successor = None
        if record.detaching == message.connection:
            record.detaching = None
        if record.lent and record.request.connection == message.connection:
            record.lent = False
            if record.state is PoolState.LENT:
                self._keep(record)

    def _keep(self, record: PoolRecord) -> None:
        record.state = PoolState.KEPT
        self._patience.set(record.pool.worker, self.loop.time() + self._context.settings.pool_linger)

    def _quieten(self, record: PoolRecord, successor: AttachPool | None = None) -> None:
        record.state = PoolState.QUIETING
        record.successor = successor
        record.users = {"leases", "scheduler"}
        self._patience.set(record.pool.worker, self.loop.time() + self._context.settings.attach_wait)
        self._tell_quiesce(record, force=record.renewing)

    def _tell_quiesce(self, record: PoolRecord, *, force: bool) -> None:
        why = "the pool is registered anew: a peer lost its rights" if record.renewing else "the worker is gone"
        for actor in (self._context.leases, self._context.scheduler):
            actor.tell(Quiesce(record.pool, force, why))

    @handles(Quiesced)
    def quiet(self, message: Quiesced) -> None:
        """One of the two that use the pool has let go of it; what answers for an earlier epoch says nothing of it."""
        record = self._records.get(message.pool.worker)
        if record is None or record.pool is not message.pool or record.state is not PoolState.QUIETING:
            return
        record.users.discard(message.by)
        if record.users:
            return
        if record.ends or record.renewing:
            record.renewing = not record.ends
            self._end(record)
        else:
            self._readmit(record)

    def _readmit(self, record: PoolRecord) -> None:
        """The same memory for a successor; a new epoch, so that nobody mixes the two up."""
        self._succeed(record)
        self._announce_down(record.pool)
        self._last_id += 1
        record.pool = record.with_epoch(self._last_id)
        for actor in (self._context.handshake, self._context.leases, self._context.scheduler):
            actor.tell(PoolUp(record.pool, self._transport.metadata))
        self._lend(record)

    def _succeed(self, record: PoolRecord) -> None:
        """The memory is its successor's from now on."""
        assert record.successor is not None  # noqa: S101 - there is one
        self._close_descriptor(record.successor)
        record.request, record.successor = record.successor, None
        self._last_id += 1
        record.tenancy = self._last_id

    @handles(RenewPool)
    def renew(self, message: RenewPool) -> None:
        """Who has the keys is not trusted any more; a pool that is not registered, or is about to end, has none."""
        record = self._records.get(message.worker)
        if record is not None and record.state in (PoolState.LENT, PoolState.KEPT, PoolState.QUIETING):
            record.renewing = True
            self._quieten(record, record.successor)

    @handles(_Moved)
    def moved(self, message: _Moved) -> None:
        """The memory lies somewhere else; where it cannot, it is at least registered anew."""
        record = self._records[message.worker]
        if isinstance(message.result, KvdError):
            _log.error(
                "a pool keeps its address, so that old keys may read it",
                pool=message.worker,
                reason=message.result.text,
            )
        self._last_id += 1
        record.pool = record.with_epoch(self._last_id)
        self._register(record, record.pool.spec, record.pool.raw_spec)

    def _renewed(self, record: PoolRecord) -> None:
        """There are new keys: the pool's life goes on where it stopped."""
        _log.info("pool registered anew", pool=record.pool.worker, epoch=record.pool.epoch)
        record.renewing = False
        if record.successor is not None:
            self._succeed(record)
            self._lend(record)
        elif record.detaching is not None:
            self._quieten(record)
        elif record.lent:
            record.state = PoolState.LENT
            self._context.gateway.tell(PoolRenewed(record.pool))
        else:
            self._keep(record)

    @handles(_Overdue)
    def overdue(self, message: _Overdue) -> None:
        """Nobody came for a kept pool; or a pool did not become quiet in time."""
        record = self._records[message.worker]
        if record.state is PoolState.KEPT:
            self._quieten(record)
        elif record.state is PoolState.QUIETING and "leases" in record.users:
            # Breaking a lease is safe (its fences fail from here on); an open write into the pool is not.
            self._tell_quiesce(record, force=True)
            self._patience.set(message.worker, self.loop.time() + self._context.settings.attach_wait)
        elif record.state is PoolState.QUIETING:
            self._give_up(record)

    def _give_up(self, record: PoolRecord) -> None:
        """The transport may still write into the pool: whoever waits for it is refused, and the pool waits on."""
        waiting = record.successor.connection if record.successor else record.detaching
        if record.successor:
            self._close_descriptor(record.successor)
        record.successor, record.detaching = None, None
        self._patience.set(record.pool.worker, self.loop.time() + self._context.settings.attach_wait)
        if waiting is not None:
            self._context.gateway.tell(AttachRefused(waiting, record.quarantined()))

    def _end(self, record: PoolRecord) -> None:
        record.state = PoolState.ENDING
        self._patience.unset(record.pool.worker)
        self._announce_down(record.pool)
        self._transport.deregister(record.pool.id)

    def _announce_down(self, pool: Pool) -> None:
        for actor in (self._context.handshake, self._context.leases, self._context.scheduler):
            actor.tell(PoolDown(pool))

    @handles(Deregistered)
    def deregistered(self, event: Deregistered) -> None:
        """The memory is nobody's: gives it back, or maps it somewhere else."""
        record = self._by_id(event.pool)
        if record.renewing:
            self._move(record)
        else:
            self._release(record)

    def _release(self, record: PoolRecord, refusal: KvdError | None = None) -> None:
        """Ends the pool; whoever waits for it then hears `refusal`, if there is one.

        Its memory is given back, but where the transport would not have it: a worker may bring that again.
        """
        memory, worker = record.memory, record.pool.worker
        assert memory is not None  # noqa: S101 - it was registered, or would have been
        record.state = PoolState.ENDING
        end = memory.free if refusal is None else memory.close
        self._background(end, lambda result: self.tell(_Released(worker, result, refusal)))

    @handles(_Released)
    def released(self, message: _Released) -> None:
        """The pool is gone: starts anew for a successor that wants another size or layout."""
        if message.result is not None:
            _log.error("memory is not given back", pool=message.worker, reason=message.result.text)
        record = self._drop(message.worker)
        if record.detaching is not None:
            self._context.gateway.tell(PoolReturned(record.detaching))
        if message.refusal is not None:
            for request in (record.request, record.successor):
                if request is not None:
                    self._context.gateway.tell(AttachRefused(request.connection, message.refusal))
        elif record.successor is not None:
            self._make(record.successor)

    def _move(self, record: PoolRecord) -> None:
        memory, worker = record.memory, record.pool.worker
        assert memory is not None  # noqa: S101 - it was registered

        def work() -> Memory:
            memory.move()
            return memory

        self._background(work, lambda result: self.tell(_Moved(worker, result)))

    def _drop(self, worker: str) -> PoolRecord:
        record = self._records.pop(worker)
        assert record.memory is not None  # noqa: S101 - it was made
        self._context.completion.tell(Forget(worker))
        self._context.metrics.pool_bytes.labels(record.memory.backing).dec(record.pool.size)
        self._store.drop(worker)
        return record

    # --- the rest ---------------------------------------------------------------------------------------------------

    def _refuse(self, request: AttachPool, error: KvdError) -> None:
        self._close_descriptor(request)
        self._context.gateway.tell(AttachRefused(request.connection, error))

    def _close_descriptor(self, request: AttachPool) -> None:
        if request.descriptor >= 0:
            self._provider.discard(request.descriptor)

    def _by_id(self, pool: int) -> PoolRecord:
        for record in self._records.values():
            if record.pool.id == pool:
                return record
        raise InternalError(ErrorCode.INTERNAL, f"no pool has the number {pool}")

    @handles(Report)
    def report(self, message: Report) -> None:
        """Pools by worker: size, memory, state."""
        content = [record.report() for record in self._records.values()]
        self._context.gateway.tell(Reported(message.token, "pools", content))
