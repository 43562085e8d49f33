"""Routes, which are worked out once and used by every pull: short ones at once, long ones on a thread."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvd import limits
from kvd.actors.runtime.actor import Actor, Background
from kvd.actors.scheduler.pull import Pull
from kvd.actors.scheduler.routes import RouteKey, Sources, is_long, make_route, route_key
from kvd.errors import ErrorCode, KvdError, refusal


@dataclass(frozen=True, slots=True)
class _Known:
    """A route, or why there is none: that takes as long to find out."""

    sources: Sources
    refused: tuple[ErrorCode, str] | None
    cost: int
    """In ranks (`limits.MAX_ROUTED_RANKS`)."""


class KnownRoutes:
    """See the module's text. The thread makes one at a time; users take turns.

    `made` is called with the key of a route for which pulls may wait (`Pull.routing`).
    """

    def __init__(self, actor: Actor, background: Background, made: Callable[[RouteKey], None]) -> None:
        self._actor = actor
        self._background = background
        self._made = made
        self._known: dict[RouteKey, _Known] = {}
        """The one that was used last is the last."""
        self._waiting: dict[int, dict[RouteKey, Callable[[], Sources]]] = {}
        """What the thread is to make, by user; the first of each is next."""
        self._making: RouteKey | None = None
        self._is_stale = False
        """Whether what is being made is not wanted any more."""

    def __len__(self) -> int:
        return len(self._known)

    def find(self, pull: Pull) -> Sources | None:
        """The producer ranks that a pull reads from or reports to; None if they are being worked out.

        Raises:
            Unavailable: `OVERLOADED`, the user's pulls wait for too many routes.
            KvdError: a pool is gone, or its layout does not fit ours.

        """
        ranks, views = pull.ticket.ranks, pull.views
        key = route_key(pull.pool, ranks, views)
        pull.routing = None
        known = self._known.pop(key, None)
        if known is None:
            make = partial(make_route, pull.pool, ranks, dict(views))  # the pull may be told of others meanwhile
            if is_long(views[rank.address].pools[rank.pool] for rank in ranks):
                self._put_off(key, pull.pool.uid, make)
                pull.routing = key
                return None
            known = _outcome(key, make)
            self._make_room(known.cost)
        self._known[key] = known
        if known.refused is not None:
            raise refusal(*known.refused)  # a new one: an error keeps what it was raised through
        return known.sources

    def forget(self, is_gone: Callable[[RouteKey], bool]) -> None:
        """Forgets the routes of a peer or of a pool."""
        self._known = {key: known for key, known in self._known.items() if not is_gone(key)}
        for uid, waiting in list(self._waiting.items()):
            for key in [key for key in waiting if is_gone(key)]:
                del waiting[key]
            if not waiting:
                del self._waiting[uid]
        self._is_stale |= self._making is not None and is_gone(self._making)

    def _put_off(self, key: RouteKey, uid: int, make: Callable[[], Sources]) -> None:
        waiting = self._waiting.get(uid, {})
        if (key == self._making and not self._is_stale) or key in waiting:
            return
        if len(waiting) >= limits.MAX_ROUTES_WAITING:
            text = f"{len(waiting)} routes between layouts are being worked out for this user; try again later"
            raise refusal(ErrorCode.OVERLOADED, text)
        self._waiting.setdefault(uid, {})[key] = make
        self._start()

    def _start(self) -> None:
        if self._making is not None or not self._waiting:
            return
        uid = next(iter(self._waiting))
        waiting = self._waiting.pop(uid)
        self._making = key = next(iter(waiting))
        make = waiting.pop(key)
        if waiting:
            self._waiting[uid] = waiting  # behind all other users
        self._background(make, lambda result: self._actor.call(self._end, key, result))

    def _end(self, key: RouteKey, result: Sources | KvdError) -> None:
        if not self._is_stale:
            known = _known(key, result)
            self._make_room(known.cost)
            self._known[key] = known
        self._making, self._is_stale = None, False
        self._start()
        self._made(key)

    def _make_room(self, cost: int) -> None:
        """Forgets the routes that were not used for longest; pulls keep what they have."""
        kept = sum(known.cost for known in self._known.values())
        while self._known and kept + cost > limits.MAX_ROUTED_RANKS:
            kept -= self._known.pop(next(iter(self._known))).cost


def _outcome(key: RouteKey, make: Callable[[], Sources]) -> _Known:
    try:
        return _known(key, make())
    except KvdError as error:
        return _known(key, error)


def _known(key: RouteKey, result: Sources | KvdError) -> _Known:
    ranks = len(key[1])
    if isinstance(result, KvdError):
        return _Known((), (result.code, result.text), ranks)
    descriptors = sum(source.planner.of_a_block for source in result if source.planner is not None)
    return _Known(result, None, ranks + descriptors // limits.DESCRIPTORS_PER_RANK)
