"""Pools: has their memory made and registered, lends it to workers and takes it back.

When its worker is gone, a pool is kept for a successor, which gets it only when it is quiesced: leases and open reads
of the predecessor bind the successor too, since it cannot write to memory that it does not have. It does not get it
before the predecessor's process has ended either: a session may be lost whose process lives on and writes.

Anybody who has a pool's keys can read it for as long as it is registered, and nobody hears of it. So when a peer loses
its rights, the pools that it has keys of are quiesced by force, registered again, and mapped at another address: some
fabrics check no keys, and at the old address they find zeros.
"""

from collections.abc import Callable, Collection

import structlog
from msgspec.structs import replace

from kvd.actors.completion.actor import CompletionActor
from kvd.actors.pools.bounds import Bounds, Lack
from kvd.actors.pools.memory import PoolMemory
from kvd.actors.pools.record import PoolRecord, PoolState
from kvd.actors.pools.requests import AttachPool, DetachPool, Lent, User, Watcher, Workers
from kvd.actors.runtime.actor import Actor, call
from kvd.actors.runtime.blocks import BlocksInUse
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.deferred import Deadlines
from kvd.actors.runtime.loop import Background
from kvd.actors.runtime.records import Pool
from kvd.errors import ErrorCode, KvdError, NoMemory, refusal
from kvd.memory.interface import MemoryProvider, PoolStore
from kvd.transport.interface import Transport

_log = structlog.get_logger("kvd.pools")

_LAST_LOOK = 0.1
"""Seconds for which a pool is kept beyond its time: its worker may have asked for it while this process was paused."""


class PoolsActor(Actor):
    """A failure stops the daemon: a pool in a wrong state is memory that two workers write to.

    `leased` gives the ids of the pools of which offers stand.
    """

    name = "pools"

    def __init__(
        self,
        context: ActorContext,
        provider: MemoryProvider,
        transport: Transport,
        background: Background,
        store: PoolStore,
        *,
        completion: CompletionActor,
        workers: Workers,
        leased: Callable[[], Collection[int]],
    ) -> None:
        super().__init__(context.dispatcher)
        self._context = context
        self._completion = completion
        self._workers = workers
        self._watchers: list[Watcher] = []
        self._users: dict[str, User] = {}
        self._provider = provider
        self._transport = transport
        self.memory = PoolMemory(
            self, context, provider, transport, background=background, store=store, up=self._up, gone=self._gone
        )
        self._records: dict[str, PoolRecord] = {}
        end, refuse = self._end_for, self._refuse
        self._bounds = Bounds(provider, store, self._records, leased=leased, end=end, refuse=refuse)
        self._last_id = 0
        self._patience: Deadlines[str] = Deadlines(context.loop, lambda worker: self.call(self._overdue, worker))
        """How long a pool is kept, or may take to quiesce, by worker."""

    def watch(self, watcher: Watcher) -> None:
        """Tells `watcher` of pools from now on."""
        self._watchers.append(watcher)

    def use(self, user: User) -> None:
        """Tells `user` of pools from now on, and has no pool go to another worker, or end, before `user` says so."""
        self.watch(user)
        self._users[user.name] = user

    # --- a worker comes ---------------------------------------------------------------------------------------------

    def attach(self, request: AttachPool) -> None:
        """Lends the worker its pool: at once, after making it, or when its predecessor and its transfers have ended."""
        record = self._records.get(request.worker)
        try:
            if record is not None:
                record.check_free(request)
        except KvdError as error:
            self._refuse(request, error)
            return
        if record is not None and record.state is PoolState.KEPT and record.is_own(request):
            if record.waiting is not None:
                self._refuse_waiting(record, f"{record.holder}, which had it, has come back")
            self._close_descriptor(request)
            self._give_to(record, request)
            self._lend(record)
        elif lack := self._bounds.lack(request):  # before the predecessor's pool is ended for it
            self._bounds.make_room(request, lack)
        elif record is None:
            self._make(request)
        else:
            record.waiting = request
            self._succeed(record, request)

    def _succeed(self, record: PoolRecord, request: AttachPool) -> None:
        """Quiesces the pool for a successor; first waits until the predecessor's process has ended."""
        if not record.is_held_beside(request):
            self._quiesce(record, PoolState.QUIESCING)
        elif record.request.watched:
            self._await_end(record)
        else:
            text = "a pool goes to a successor though nothing tells whether its predecessor has ended"
            _log.warning(text, pool=record.pool.worker, predecessor=record.holder)
            record.held = False
            self._quiesce(record, PoolState.QUIESCING)

    def _await_end(self, record: PoolRecord) -> None:
        _log.info("a successor waits for a process to end", pool=record.pool.worker, predecessor=record.holder)
        record.state = PoolState.KEPT
        self._patience.set(record.pool.worker, self.loop.time() + self._context.settings.attach_wait)

    def _make(self, request: AttachPool) -> None:
        number = self._next_id()
        spec = request.spec
        blocks = BlocksInUse(spec)
        pool = Pool(number, request.worker, number, 0, spec.pool_bytes, spec, request.raw_spec, blocks, request.uid)
        record = PoolRecord(pool, request, tenancy=number, waiting=request)
        self._records[request.worker] = record
        self.memory.make(record)

    def _up(self, record: PoolRecord, metadata: bytes) -> None:
        """The pool can be used, and goes to whoever waits for it."""
        for watcher in self._watchers:
            call(watcher.pool_up, record.pool, metadata)
        renewed = record.state is PoolState.RENEWING
        if renewed:
            _log.info("pool registered anew", pool=record.pool.worker, epoch=record.pool.epoch)
        if record.ending or isinstance(record.waiting, DetachPool):
            self._quiesce(record, PoolState.QUIESCING)
        elif record.waiting is None:
            self._keep(record)
        elif record.waiting is record.request and renewed:
            record.state, record.waiting = PoolState.LENT, None
            self._workers.renewed(record.pool)
        elif record.waiting is record.request:
            self._lend(record)
        elif record.is_held_beside(record.waiting):
            self._await_end(record)  # it was registered anew meanwhile
        else:
            self._close_descriptor(record.waiting)
            if not record.is_own(record.waiting):
                record.tenancy = self._next_id()
            self._give_to(record, record.waiting)
            self._lend(record)

    def _give_to(self, record: PoolRecord, request: AttachPool) -> None:
        before, record.request = record.request, request
        self._workers.released(before.connection)

    def _lend(self, record: PoolRecord) -> None:
        record.state, record.waiting, record.held = PoolState.LENT, None, True
        self._patience.unset(record.pool.worker)
        self.memory.lent(record)
        connection = record.request.connection
        self._workers.lent(Lent(connection, record.pool, record.mapped, record.kept, record.tenancy))
        record.kept = True

    # --- it goes ----------------------------------------------------------------------------------------------------

    def detach(self, request: DetachPool) -> None:
        """A worker gives its pool back: it ends once it is quiesced."""
        record = self._records.get(request.worker)
        if record is None or record.request.connection != request.connection:
            return  # it was lost meanwhile, and its worker has been told
        record.waiting, record.ending = request, True
        if record.state is PoolState.LENT:
            self._quiesce(record, PoolState.QUIESCING)

    def worker_gone(self, worker: str, connection: int) -> None:
        """A session ended without a detach. The pool is kept for a successor, for a while: leases and reads go on."""
        for waited_for in self._records.values():
            if waited_for.waiting is not None and waited_for.waiting.connection == connection:
                self._stop_waiting(waited_for)
        record = self._records.get(worker)
        if record is None or record.request.connection != connection:
            self._workers.released(connection)
        elif record.state is PoolState.LENT:
            self._keep(record)

    def worker_ended(self, connection: int) -> None:
        """The process that opened a session which is gone has ended, too, and writes to no memory any more.

        Nothing but its leases and reads keeps its pool from a successor now.
        """
        for record in self._records.values():
            if record.request.connection == connection:
                record.held = False
                if record.state is PoolState.KEPT and record.waiting is not None:
                    self._quiesce(record, PoolState.QUIESCING)
                else:
                    self._linger(record)

    def _stop_waiting(self, record: PoolRecord) -> None:
        if isinstance(record.waiting, AttachPool) and record.waiting is not record.request:
            self._close_descriptor(record.waiting)
        record.waiting = None
        self._linger(record)

    def _keep(self, record: PoolRecord) -> None:
        record.state = PoolState.KEPT
        self._linger(record)

    def _linger(self, record: PoolRecord) -> None:
        """Keeps a pool that nobody waits for as long as its process lives, which may map it, and for a while after."""
        if record.waiting is not None or not (record.state is PoolState.KEPT or record.forsaken):
            return
        record.overdue, record.kept_since = False, self.loop.time()
        if record.held and record.request.watched:
            self._patience.unset(record.pool.worker)
        else:
            self._patience.set(record.pool.worker, self.loop.time() + self._context.settings.pool_linger)

    def end(self, request: DetachPool, uid: int | None) -> None:
        """Ends a pool whose worker is gone, as an operator of this user asks; None may end everybody's."""
        record = self._records.get(request.worker)
        try:
            if record is None:
                raise refusal(ErrorCode.BAD_POOL, f"no pool is called {request.worker!r}; `kvd status` lists them")
            record.check_ended_by(uid)
        except KvdError as error:
            self._workers.refused(request.connection, error)
            return
        _log.info("a pool is ended by command", pool=request.worker)
        record.waiting, record.ending = request, True
        self._quiesce(record, PoolState.QUIESCING)

    def _end_for(self, record: PoolRecord, request: AttachPool) -> None:
        record.waiting = request
        self._quiesce(record, PoolState.QUIESCING)

    # --- it is quiesced ---------------------------------------------------------------------------------------------

    def renew(self, worker: str) -> None:
        """A peer that has the keys of a worker's pool has lost its rights: a registered pool gets new ones.

        One that is being made or is about to end has none that anybody knows.
        """
        record = self._records.get(worker)
        if record is None or record.state not in (PoolState.LENT, PoolState.KEPT, PoolState.QUIESCING):
            return
        if record.state is PoolState.LENT:
            record.waiting = record.request
        self._quiesce(record, PoolState.RENEWING)

    def _quiesce(self, record: PoolRecord, state: PoolState) -> None:
        record.state = state
        record.users = set(self._users)
        self._tell_quiesce(record, force=state is PoolState.RENEWING)

    def _tell_quiesce(self, record: PoolRecord, *, force: bool) -> None:
        renewing = record.state is PoolState.RENEWING
        why = "the pool is registered anew: a peer lost its rights" if renewing else "the worker is gone"
        for user in self._users.values():
            call(user.quiesce, record.pool, why, force=force)
        self._patience.set(record.pool.worker, self.loop.time() + self._context.settings.attach_wait)

    def quiesced(self, pool: Pool, user: str) -> None:
        """Nothing of `user` uses the pool any more; an answer for an earlier epoch says nothing of this one."""
        record = self._records.get(pool.worker)
        if record is None or record.pool is not pool or user not in record.users:
            return
        record.users.remove(user)
        if record.users:
            return
        self._patience.unset(record.pool.worker)
        for watcher in self._watchers:
            call(watcher.pool_down, record.pool)
        if record.ends:
            record.state = PoolState.ENDING
        else:
            record.pool = replace(record.pool, epoch=self._next_id())
        if record.state is PoolState.QUIESCING:
            self._up(record, self._transport.metadata)
        else:
            self.memory.deregister(record)

    def _overdue(self, worker: str) -> None:
        """Nobody came for a kept pool, or a pool did not quiesce in time."""
        record = self._records[worker]
        if record.state is PoolState.KEPT and record.waiting is not None:
            self._refuse_waiting(record, f"{record.holder} had it and has not ended; end that process")
        elif (record.state is PoolState.KEPT or record.forsaken) and not record.overdue:
            record.overdue = True
            self._patience.set(worker, self.loop.time() + _LAST_LOOK)
        elif record.state is PoolState.KEPT or record.forsaken:
            _log.info("nobody came for a pool", pool=worker, uid=record.request.uid, bytes=record.pool.size)
            record.ending = True
            self._quiesce(record, PoolState.QUIESCING)
        elif "leases" in record.users:
            # Breaking a lease is safe (its fences fail from here on); an open write into the pool is not.
            self._tell_quiesce(record, force=True)
        elif record.users:
            self._give_up(record)

    def _give_up(self, record: PoolRecord) -> None:
        """The transport may still write into the pool: a worker that waits for it is refused, and the pool waits on."""
        self._patience.set(record.pool.worker, self.loop.time() + self._context.settings.attach_wait)
        if record.waiting is not None and record.waiting is not record.request:
            self._refuse_waiting(record, "it is in quarantine, as a read into it has not ended")

    def _refuse_waiting(self, record: PoolRecord, why: str) -> None:
        assert record.waiting is not None  # noqa: S101 - it is asked for only then
        pool = f"the pool {record.pool.worker!r}"
        if isinstance(record.waiting, DetachPool):
            text = f"{pool} ends later: {why}"
        else:
            guest = "" if record.waiting.worker == record.pool.worker else ", which was to make room,"
            text = f"{pool}{guest} cannot be had: {why}; try again later, or attach under another name"
        error = refusal(ErrorCode.POOL_BUSY, text)
        self._workers.refused(record.waiting.connection, error)
        self._stop_waiting(record)

    def _gone(self, record: PoolRecord, error: KvdError | None) -> None:
        """The pool has no memory any more. A successor that wants another size or layout gets a new pool."""
        waiting = record.waiting
        del self._records[record.pool.worker]
        self._workers.released(record.request.connection)
        self._completion.forget(record.pool.worker)
        if isinstance(waiting, DetachPool):
            self._workers.returned(waiting.connection)
        elif waiting is not None:
            if error is None:
                self.attach(waiting)
            elif isinstance(error, NoMemory):
                self._bounds.make_room(waiting, Lack(error, error.lacks))
            else:
                self._stop_waiting(record)
                self._workers.refused(waiting.connection, error)

    # --- the rest ---------------------------------------------------------------------------------------------------

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _refuse(self, request: AttachPool, error: KvdError) -> None:
        self._close_descriptor(request)
        self._workers.refused(request.connection, error)

    def _close_descriptor(self, request: AttachPool) -> None:
        if request.descriptor >= 0:
            self._provider.discard(request.descriptor)

    def report(self) -> list[dict[str, object]]:
        """Each pool's size, memory and state: its part of a status."""
        return [record.report() for record in self._records.values()]
