"""Pools: has their memory made and registered, lends it to workers and takes it back.

When its worker is gone, a pool is kept for a successor, which gets it only when it is quiesced: leases and open reads
of the predecessor bind the successor too, since it cannot write to memory that it does not have. It does not get it
before the predecessor's process has ended either: a session may be lost whose process lives on and writes.

Anybody who has a pool's keys can read it for as long as it is registered, and nobody hears of it. So when a peer loses
its rights, the pools that it has keys of are quiesced by force, registered again, and mapped at another address: some
fabrics check no keys, and at the old address they find zeros.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType

import structlog
from msgspec.structs import replace

from kvd.actors.completion.actor import CompletionActor
from kvd.actors.pools.bounds import Bounds, Lack
from kvd.actors.pools.memory import PoolMemory
from kvd.actors.pools.pool import TABLE, Effect, Event, PoolRecord, State
from kvd.actors.pools.requests import AttachPool, DetachPool, Lent, User, Watcher, Workers
from kvd.actors.pools.waits import Waits
from kvd.actors.runtime.actor import Actor, Background, call
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.pools import BlocksInUse, Pool
from kvd.errors import ErrorCode, KvdError, NoMemory, refusal
from kvd.memory.interface import MemoryProvider, PoolStore
from kvd.protocol.status import PoolStatus
from kvd.transport.interface import Transport

_log = structlog.get_logger("kvd.pools")


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
        self._completion = completion
        self._workers = workers
        self._watchers: list[Watcher] = []
        self._users: dict[str, User] = {}
        self._waits = Waits(self, context, self._users, overdue=self._overdue, expired=self._expired)
        self.memory = PoolMemory(
            self, context, provider, transport, background=background, store=store, up=self._up, step=self._step
        )
        self._effects: Mapping[Effect, Callable[[PoolRecord], None]] = MappingProxyType(
            {
                Effect.LEND: self._lend,
                Effect.TELL_RENEWED: self._tell_renewed,
                Effect.LINGER: self._waits.linger,
                Effect.AWAIT: self._await_end,
                Effect.QUIESCE: self._waits.quiesce,
                Effect.BREAK: partial(self._waits.quiesce, force=True),
                Effect.HURRY: self._hurry,
                Effect.REFUSE: self._refuse_for_process,
                Effect.LOOK_AGAIN: self._waits.look_again,
                Effect.OPEN: self._up,
                Effect.DEREGISTER: self.memory.deregister,
                Effect.MOVE: self.memory.move,
                Effect.CLOSE: self.memory.close,
                Effect.FREE: self.memory.free,
                Effect.FORGET: self._forget,
            }
        )
        self._records: dict[str, PoolRecord] = {}
        end, refuse = self._end_for, self._refuse
        self._bounds = Bounds(provider, store, self._records, leased=leased, end=end, refuse=refuse)
        self._last_id = 0

    def watch(self, watcher: Watcher) -> None:
        """Tells `watcher` of pools from now on."""
        self._watchers.append(watcher)

    def use(self, user: User) -> None:
        """Tells `user` of pools from now on, and has no pool go to another worker, or end, before `user` says so."""
        self.watch(user)
        self._users[user.actor.name] = user

    def _step(self, record: PoolRecord, event: Event) -> None:
        """Carries an event out."""
        step = TABLE.step(record.state, event)
        record.state = step.state
        for effect in step.effects:
            self._effects[effect](record)

    # --- a worker comes ---------------------------------------------------------------------------------------------

    def attach(self, request: AttachPool) -> None:
        """Lends the worker its pool: at once, after making it, or when its predecessor and its transfers have ended."""
        record = self._records.get(request.worker)
        try:
            if record is not None:
                record.check_free(request)
            self._check_waits_alone(request)
        except KvdError as error:
            self._refuse(request, error)
            return
        if record is not None and record.state is not State.FORSAKEN and record.is_own(request):
            if record.state is State.AWAITED:
                self._refuse_waiting(record, f"{record.holder}, which had it, has come back")
            self._close_descriptor(request)
            self._give_to(record, request)
            self._step(record, Event.LEND)
        elif lacks := self._bounds.lacks(request):  # before the predecessor's pool is ended for it
            self._bounds.make_room(request, lacks)
        elif record is None:
            self._make(request)
        else:
            record.waiting = request
            self._succeed(record, request)

    def _check_waits_alone(self, request: AttachPool) -> None:
        """Refuses a second attach of a name of which another one waits for room: pools would be ended for both."""
        for record in self._records.values():
            waiting = record.waiting
            if isinstance(waiting, AttachPool) and record.pool.name != waiting.worker == request.worker:
                text = f"another worker waits for room for the pool {request.worker!r}; attach under another name"
                raise refusal(ErrorCode.POOL_BUSY, text)

    def _succeed(self, record: PoolRecord, request: AttachPool) -> None:
        """Quiesces the pool for a successor; first waits until the predecessor's process has ended."""
        if not record.is_held_beside(request):
            self._step(record, Event.CLEAR)
        elif record.request.watched:
            self._step(record, Event.AWAIT)
        else:
            text = "a pool goes to a successor though nothing tells whether its predecessor has ended"
            _log.warning(text, pool=record.pool.name, predecessor=record.holder)
            record.held = False
            self._step(record, Event.CLEAR)

    def _await_end(self, record: PoolRecord) -> None:
        _log.info("a successor waits for a process to end", pool=record.pool.name, predecessor=record.holder)
        self._waits.begin(record)

    def _make(self, request: AttachPool) -> None:
        number = self._next_id()
        spec = request.spec
        blocks = BlocksInUse(spec)
        pool = Pool(number, request.worker, number, 0, spec.pool_bytes, spec, request.raw_spec, blocks, request.uid)
        record = PoolRecord(pool, request, tenancy=number, waiting=request)
        self._records[request.worker] = record
        self.memory.make(record)

    def _up(self, record: PoolRecord) -> None:
        """The pool can be used, and goes to whoever waits for it."""
        for watcher in self._watchers:
            call(watcher.pool_up, record.pool)
        renewed = record.state is State.RENEWING
        if renewed:
            _log.info("pool registered anew", pool=record.pool.name, epoch=record.pool.epoch)
        if record.ends or isinstance(record.waiting, DetachPool):  # perhaps only since it was quiesced
            self._step(record, Event.CLEAR)
        elif record.waiting is None:
            self._step(record, Event.UNWANTED)
        elif record.waiting is record.request:
            self._step(record, Event.RENEWED if renewed else Event.LEND)
        elif record.is_held_beside(record.waiting):
            self._step(record, Event.AWAIT)  # it was registered anew meanwhile
        else:
            self._close_descriptor(record.waiting)
            if not record.is_own(record.waiting):
                record.tenancy = self._next_id()
            self._give_to(record, record.waiting)
            self._step(record, Event.LEND)

    def _tell_renewed(self, record: PoolRecord) -> None:
        record.waiting = None
        self._workers.renewed(record.pool)

    def _give_to(self, record: PoolRecord, request: AttachPool) -> None:
        before, record.request = record.request, request
        self._workers.released(before.connection)

    def _lend(self, record: PoolRecord) -> None:
        record.waiting, record.held = None, True
        self._waits.end(record)
        self.memory.lent(record)
        connection = record.request.connection
        self._workers.lent(Lent(connection, record.pool, record.mapped, record.preserved, record.tenancy))
        record.preserved = True

    # --- it goes ----------------------------------------------------------------------------------------------------

    def detach(self, request: DetachPool) -> None:
        """A worker gives its pool back: it ends once it is quiesced."""
        record = self._records.get(request.worker)
        if record is None or record.request.connection != request.connection:
            return  # it was lost meanwhile, and its worker has been told
        record.waiting, record.ending = request, True
        self._step(record, Event.DETACH)

    def worker_gone(self, worker: str, connection: int) -> None:
        """A session ended without a detach. The pool is kept for a successor, for a while: leases and reads go on."""
        for waited_for in self._records.values():
            if waited_for.waiting is not None and waited_for.waiting.connection == connection:
                self._stop_waiting(waited_for)
        record = self._records.get(worker)
        if record is None or record.request.connection != connection:
            self._workers.released(connection)
        else:
            self._step(record, Event.LEFT)

    def worker_ended(self, connection: int) -> None:
        """The process that opened a session which is gone has ended, too, and writes to no memory any more.

        Nothing but its leases and reads keeps its pool from a successor now.
        """
        for record in self._records.values():
            if record.request.connection == connection:
                record.held = False
                self._step(record, Event.PROCESS_ENDED)

    def _stop_waiting(self, record: PoolRecord) -> None:
        if isinstance(record.waiting, AttachPool) and record.waiting is not record.request:
            self._close_descriptor(record.waiting)
        record.waiting = None
        if not record.ending:
            self._step(record, Event.UNAWAITED)

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
        self._step(record, Event.CLEAR)

    def _end_for(self, record: PoolRecord, request: AttachPool) -> None:
        record.waiting = request
        self._step(record, Event.CLEAR)

    # --- it is quiesced ---------------------------------------------------------------------------------------------

    def renew(self, worker: str) -> None:
        """A peer that has the keys of a worker's pool has lost its rights: a registered pool gets new ones.

        One that is being made or is about to end has none that anybody knows.
        """
        record = self._records.get(worker)
        if record is None:
            return
        if record.state is State.LENT:
            record.waiting = record.request
        self._step(record, Event.RENEW)

    def quiesced(self, pool: Pool, user: str) -> None:
        """Nothing of `user` uses the pool any more; an answer for an earlier epoch says nothing of this one."""
        record = self._records.get(pool.name)
        if record is None or record.pool is not pool or user not in record.users:
            return
        record.users.remove(user)
        if record.users:
            return
        self._waits.end(record)
        keys_end = record.ends or record.state is State.RENEWING
        for watcher in self._watchers:
            call(watcher.pool_down, record.pool, keys_end=keys_end)
        if record.ends:
            self._step(record, Event.SPENT)
        else:
            record.pool = replace(record.pool, epoch=self._next_id())
            self._step(record, Event.QUIET)

    def _overdue(self, worker: str) -> None:
        """Nobody came for a kept pool, or a pool did not quiesce in time."""
        self._step(self._records[worker], Event.TIME)

    def _expired(self, record: PoolRecord) -> None:
        _log.info("nobody came for a pool", pool=record.pool.name, uid=record.request.uid, bytes=record.pool.size)
        record.ending = True
        self._step(record, Event.CLEAR)

    def _hurry(self, record: PoolRecord) -> None:
        if "leases" in record.users:
            # Breaking a lease is safe (its fences fail from here on); an open write into the pool is not.
            self._waits.ask(record, force=True)
        elif record.users:
            self._give_up(record)

    def _give_up(self, record: PoolRecord) -> None:
        """The transport may still write into the pool: a worker that waits for it is refused, and the pool waits on."""
        self._waits.begin(record)
        if record.waiting is not None and record.waiting is not record.request:
            self._refuse_waiting(record, "it is in quarantine, as a read into it has not ended")

    def _refuse_for_process(self, record: PoolRecord) -> None:
        self._refuse_waiting(record, f"{record.holder} had it and has not ended; end that process")

    def _refuse_waiting(self, record: PoolRecord, why: str) -> None:
        assert record.waiting is not None  # noqa: S101 - it is asked for only then
        self._workers.refused(record.waiting.connection, record.refusal(why))
        self._stop_waiting(record)

    def _forget(self, record: PoolRecord) -> None:
        """The pool has no memory any more. A successor that wants another size or layout gets a new pool."""
        waiting, error = record.waiting, record.error
        del self._records[record.pool.name]
        self._workers.released(record.request.connection)
        self._completion.forget(record.pool.name)
        if isinstance(waiting, DetachPool):
            self._workers.returned(waiting.connection)
        elif waiting is not None:
            if error is None:
                self.attach(waiting)
            elif isinstance(error, NoMemory):
                self._bounds.make_room(waiting, [Lack(error, error.lacks, self._bounds.footprint)])
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
            self._workers.discard((request.descriptor,))

    def user_of(self, worker: str) -> int:
        """Whose a worker's pool is; -1, nobody's, if it has none (any more)."""
        record = self._records.get(worker)
        return -1 if record is None else record.request.uid

    def report(self) -> list[PoolStatus]:
        """Each pool's size, memory and state: its part of a status."""
        return [record.report() for record in self._records.values()]
