"""What pools wait for, and how long: that nothing uses them any more, a successor, or the end of a process."""

from collections.abc import Callable

from kvd import limits
from kvd.actors.pools.pool import UNUSED, PoolRecord, State
from kvd.actors.pools.requests import User
from kvd.actors.runtime.actor import Actor, Component, call
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.deferred import Deadlines


class Waits(Component):
    """Calls `overdue(worker)` when a pool has waited long enough, `expired(record)` when nobody came for one that was.

    `users` are told to end what they do with a pool, by name.
    """

    def __init__(
        self,
        actor: Actor,
        context: ActorContext,
        users: dict[str, User],
        *,
        overdue: Callable[[str], None],
        expired: Callable[[PoolRecord], None],
    ) -> None:
        self.actor = actor
        self._loop = context.loop
        self._settings = context.settings
        self._users = users
        self._overdue = overdue
        self._expired = expired
        self._patience: Deadlines[str] = Deadlines(context.loop, lambda worker: call(self._waited, worker))

    def quiesce(self, record: PoolRecord, *, force: bool = False) -> None:
        """Waits until nothing uses the pool; `force` has claims broken."""
        record.users = set(self._users)
        self.ask(record, force=force)

    def ask(self, record: PoolRecord, *, force: bool) -> None:
        """Tells whoever uses the pool to end that."""
        renewing = record.state is State.RENEWING
        why = "the pool is registered anew: a peer lost its rights" if renewing else "the worker is gone"
        for user in self._users.values():
            call(user.quiesce, record.pool, why, force=force)
        self.begin(record)

    def begin(self, record: PoolRecord) -> None:
        """Lets the pool wait as long as an attach may."""
        self._patience.set(record.pool.name, self._loop.time() + self._settings.attach_wait)

    def end(self, record: PoolRecord) -> None:
        """It waits no more."""
        self._patience.unset(record.pool.name)

    def linger(self, record: PoolRecord) -> None:
        """Keeps a pool that nobody waits for as long as its process lives, which may map it, and for a while after."""
        record.kept_since = self._loop.time()
        if record.outlived:
            self._patience.unset(record.pool.name)
        else:
            self._patience.set(record.pool.name, self._loop.time() + self._settings.pool_linger)

    def _waited(self, worker: str) -> None:
        if worker not in self._patience:  # else it waits for something else since, before this call was made
            self._overdue(worker)

    def look_again(self, record: PoolRecord) -> None:
        """Has a pool that nobody came for expire in a moment."""
        self.actor.later(limits.LAST_LOOK_SECONDS, self._looked, record, record.kept_since)

    def _looked(self, record: PoolRecord, kept_since: float) -> None:
        if record.state in UNUSED and record.kept_since == kept_since and not record.outlived:
            self._expired(record)
