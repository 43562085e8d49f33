"""The daemons that pulls read from, and the routes from their pools to ours."""

from kvd import limits
from kvd.actors.runtime.pools import PeerView
from kvd.actors.scheduler.pull import Pull
from kvd.actors.scheduler.routes import RouteKey, Source, make_route, route_key
from kvd.errors import ErrorCode, refusal
from kvd.protocol.ticket import Ticket


class Producers:
    """Peers that are ready, by address, and routes from them, which are worked out once and used by every pull."""

    def __init__(self) -> None:
        self._views: dict[str, PeerView] = {}
        self._routes: dict[RouteKey, tuple[Source, ...]] = {}
        """The one that was used last is the last."""

    def __getitem__(self, address: str) -> PeerView:
        return self._views[address]

    def __contains__(self, address: str) -> bool:
        return address in self._views

    def learn(self, view: PeerView) -> None:
        """Notes that a peer is ready, or has told us about its pools again."""
        self._views[view.address] = view

    def forget(self, address: str) -> None:
        """Forgets a peer that is not ready any more."""
        self._views.pop(address, None)
        self._routes = {
            key: sources for key, sources in self._routes.items() if all(address != source for source, *_ in key[1])
        }

    def forget_pool(self, epoch: int) -> None:
        """Forgets the routes to one of our own pools, which is gone."""
        self._routes = {key: sources for key, sources in self._routes.items() if key[0] != epoch}

    def unknown(self, ticket: Ticket) -> set[str]:
        """The addresses in a ticket whose daemon is not ready, or is known as a run from before the ticket."""
        known = self._views
        return {
            rank.address
            for rank in ticket.ranks
            if rank.address not in known or rank.incarnation > known[rank.address].incarnation
        }

    def check_names(self, ticket: Ticket) -> None:
        """Checks that the daemons which answer at a ticket's addresses are those that it names.

        Raises:
            BadRequest: `BAD_TICKET`, one is not.

        """
        for rank in ticket.ranks:
            found = self._views[rank.address].daemon
            if found != rank.daemon:
                text = f"the ticket is about {rank.daemon!r} at {rank.address}, where {found!r} answers"
                raise refusal(ErrorCode.BAD_TICKET, text)

    def without_pool(self, ticket: Ticket) -> set[str]:
        """The addresses in a ticket whose daemon has not named the pool: it may have come since the welcome."""
        return {rank.address for rank in ticket.ranks if rank.pool not in self._views[rank.address].pools}

    @staticmethod
    def may_come(ticket: Ticket, addresses: set[str]) -> bool:
        """Whether the pools that the daemons at `addresses` have not named may yet come.

        If the ticket names an incarnation, the pool was there when it was made, so it has gone since.
        """
        return all(rank.incarnation == 0 for rank in ticket.ranks if rank.address in addresses)

    def views(self, ticket: Ticket) -> dict[str, PeerView]:
        """The peers that a ticket names, by address."""
        return {rank.address: self._views[rank.address] for rank in ticket.ranks}

    def sources(self, pull: Pull) -> tuple[Source, ...]:
        """The producer ranks that a pull reads from or reports to, by the views that it has of them.

        Raises:
            KvdError: a pool is gone, or its layout does not fit ours.

        """
        key = route_key(pull.pool, pull.ticket.ranks, pull.views)
        route = self._routes.pop(key, None)
        if route is None:
            route = make_route(pull.pool, pull.ticket.ranks, pull.views)
            self._make_room(len(pull.ticket.ranks))
        self._routes[key] = route
        return route

    def _make_room(self, ranks: int) -> None:
        """Forgets the routes that were not used for longest, for one of so many ranks; pulls keep what they have."""
        kept = sum(len(key[1]) for key in self._routes)
        while self._routes and kept + ranks > limits.MAX_ROUTED_RANKS:
            oldest = next(iter(self._routes))
            del self._routes[oldest]
            kept -= len(oldest[1])

    @property
    def routes(self) -> int:
        """How many routes are kept."""
        return len(self._routes)
