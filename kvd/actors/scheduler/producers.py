"""The daemons that pulls read from, and the routes from their pools to ours."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count

from kvd import limits
from kvd.actors.runtime.actor import Actor, Background
from kvd.actors.runtime.pools import PeerView
from kvd.actors.scheduler.pull import Pull
from kvd.actors.scheduler.routes import RouteKey, Sources, is_long, make_route, route_key
from kvd.errors import BadRequest, ErrorCode, KvdError, refusal
from kvd.protocol.ticket import Ticket


@dataclass(frozen=True, slots=True)
class _Known:
    """A route, or why there is none: that takes as long to find out."""

    sources: Sources
    refused: tuple[ErrorCode, str] | None
    cost: int
    """In ranks (`limits.MAX_ROUTED_RANKS`)."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A route that is to be made, under a number: keys may have a thousand ranks, and take as long to compare."""

    number: int
    key: RouteKey
    make: Callable[[], Sources]
    addresses: frozenset[str]
    """Of its producers' daemons."""


class Producers:
    """Peers that are `ready`, by address, and the routes from their pools to ours.

    A route is worked out once and used by every pull: a short one at once, a long one on a thread. The thread makes one
    at a time; users take turns.

    `made` is called with the numbers of routes for which pulls may wait (`Pull.routing`), and with an error of the
    thread if that has not worked them out: the next pull has it try again. `wanted` gives the numbers of those for
    which some do.
    """

    def __init__(
        self,
        actor: Actor,
        background: Background,
        made: Callable[[Collection[int], KvdError | None], None],
        wanted: Callable[[], Collection[int]],
    ) -> None:
        self.ready: dict[str, PeerView] = {}
        self._actor = actor
        self._background = background
        self._made = made
        self._wanted = wanted
        self._known: dict[RouteKey, _Known] = {}
        """The one that was used last is the last."""
        self._waiting: dict[int, dict[RouteKey, _Wanted]] = {}
        """What the thread is to make, by user; the first of each is next."""
        self._numbers = count(1)
        self._making: _Wanted | None = None
        self._is_stale = False
        """Whether what is being made is not wanted any more."""

    @property
    def routes(self) -> int:
        """How many routes are kept."""
        return len(self._known)

    def find(self, pull: Pull) -> Sources | None:
        """The producer ranks that a pull reads from or reports to; None if they are being worked out.

        Raises:
            Unavailable: `OVERLOADED`, the user's pulls wait for too many routes.
            KvdError: a pool is gone, or its layout does not fit ours.

        """
        ranks, views = pull.ticket.ranks, pull.views
        key = route_key(pull.pool, ranks, views)
        pull.routing = 0
        known = self._known.pop(key, None)
        if known is None:
            make = partial(make_route, pull.pool, ranks, dict(views))  # the pull may be told of others meanwhile
            if is_long(pool for rank in ranks for pool in (views[rank.address].pools[rank.pool], pull.pool)):
                pull.routing = self._put_off(key, pull, make)
                return None
            known = _outcome(key, make)
            self._make_room(known.cost)
        self._known[key] = known
        if known.refused is not None:
            raise refusal(*known.refused)  # a new one: an error keeps what it was raised through
        return known.sources

    def forget(self, address: str) -> None:
        """Forgets a peer that is not ready any more, and the routes from it."""
        self.ready.pop(address, None)
        self._known = {
            key: known for key, known in self._known.items() if not any(address == source for source, *_ in key[1])
        }
        self._drop(lambda wanted: address in wanted.addresses)

    def forget_pool(self, epoch: int) -> None:
        """Forgets the routes to a pool of ours, which is gone."""
        self._known = {key: known for key, known in self._known.items() if key[0] != epoch}
        self._drop(lambda wanted: wanted.key[0] == epoch)

    def _drop(self, is_gone: Callable[[_Wanted], bool]) -> None:
        if dropped := self._drop_waiting(is_gone):
            self._actor.call(self._made, dropped, None)  # whoever waits for them has them made again
        self._is_stale |= self._making is not None and is_gone(self._making)

    def _drop_waiting(self, is_gone: Callable[[_Wanted], bool]) -> set[int]:
        """The numbers of those that are gone."""
        dropped = set()
        for uid, waiting in list(self._waiting.items()):
            for wanted in [wanted for wanted in waiting.values() if is_gone(wanted)]:
                dropped.add(waiting.pop(wanted.key).number)
            if not waiting:
                del self._waiting[uid]
        return dropped

    def _put_off(self, key: RouteKey, pull: Pull, make: Callable[[], Sources]) -> int:
        """Has the route made, if that is not to be done already; the number under which it is."""
        waiting = self._waiting.get(pull.pool.uid, {})
        if self._making is not None and self._making.key == key and not self._is_stale:
            return self._making.number
        if (known := waiting.get(key)) is not None:
            return known.number
        if len(waiting) >= limits.MAX_ROUTES_WAITING:
            text = f"{len(waiting)} routes between layouts are being worked out for this user; try again later"
            raise refusal(ErrorCode.OVERLOADED, text)
        wanted = _Wanted(next(self._numbers), key, make, pull.addresses)
        self._waiting.setdefault(pull.pool.uid, {})[key] = wanted
        self._start()
        return wanted.number

    def _start(self) -> None:
        if self._making is not None or not self._waiting:
            return
        uid = next(iter(self._waiting))
        waiting = self._waiting.pop(uid)
        self._making = wanted = waiting.pop(next(iter(waiting)))
        if waiting:
            self._waiting[uid] = waiting  # behind all other users
        self._background(wanted.make, lambda result: self._actor.call(self._end, wanted, result))

    def _end(self, made: _Wanted, result: Sources | KvdError) -> None:
        failure = None
        if self._is_stale:
            pass  # whoever waits for it has it made again
        elif isinstance(result, tuple | BadRequest):
            known = _known(made.key, result)
            self._make_room(known.cost)
            self._known[made.key] = known
        else:
            failure = result  # it may not come again: a want of memory, say
        self._making, self._is_stale = None, False
        if self._waiting:
            numbers = self._wanted()
            self._drop_waiting(lambda wanted: wanted.number not in numbers)  # their pulls have ended
        self._start()
        self._made({made.number}, failure)

    def _make_room(self, cost: int) -> None:
        """Forgets the routes that were not used for longest; pulls keep what they have."""
        kept = sum(known.cost for known in self._known.values())
        while self._known and kept + cost > limits.MAX_ROUTED_RANKS:
            kept -= self._known.pop(next(iter(self._known))).cost


def unknown(ticket: Ticket, known: Mapping[str, PeerView]) -> set[str]:
    """The addresses in a ticket whose daemon is not ready, or is `known` as a run from before the ticket."""
    return {
        rank.address
        for rank in ticket.ranks
        if rank.address not in known or rank.incarnation > known[rank.address].incarnation
    }


def check_names(ticket: Ticket, views: Mapping[str, PeerView]) -> None:
    """Checks that the daemons which answer at a ticket's addresses are those that it names.

    Raises:
        BadRequest: `BAD_TICKET`, one is not.

    """
    for rank in ticket.ranks:
        found = views[rank.address].daemon
        if found != rank.daemon:
            text = f"the ticket is about {rank.daemon!r} at {rank.address}, where {found!r} answers"
            raise refusal(ErrorCode.BAD_TICKET, text)


def without_pool(ticket: Ticket, views: Mapping[str, PeerView]) -> set[str]:
    """The addresses in a ticket whose daemon has not named the pool: it may have come since the welcome."""
    return {rank.address for rank in ticket.ranks if rank.pool not in views[rank.address].pools}


def may_come(ticket: Ticket, addresses: set[str]) -> bool:
    """Whether the pools that the daemons at `addresses` have not named may yet come.

    If the ticket names an incarnation, the pool was there when it was made, so it has gone since.
    """
    return all(rank.incarnation == 0 for rank in ticket.ranks if rank.address in addresses)


def _outcome(key: RouteKey, make: Callable[[], Sources]) -> _Known:
    try:
        return _known(key, make())
    except BadRequest as error:
        return _known(key, error)


def _known(key: RouteKey, result: Sources | KvdError) -> _Known:
    ranks = len(key[1])
    if isinstance(result, KvdError):
        return _Known((), (result.code, result.text), ranks)
    planners = [source.planner for source in result if source.planner is not None]
    size = sum(planner.of_a_block + planner.units for planner in planners)
    return _Known(result, None, ranks + size // limits.DESCRIPTORS_PER_RANK)
