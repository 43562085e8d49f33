"""The daemons that pulls read from, and the routes from their pools to ours."""

from kvd.actors.runtime.pools import PeerView
from kvd.actors.scheduler.known_routes import KnownRoutes
from kvd.actors.scheduler.pull import Pull
from kvd.actors.scheduler.routes import Sources
from kvd.errors import ErrorCode, refusal
from kvd.protocol.ticket import Ticket


class Producers:
    """Peers that are ready, by address, and the `routes` from them."""

    def __init__(self, routes: KnownRoutes) -> None:
        self._views: dict[str, PeerView] = {}
        self._routes = routes

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
        self._routes.forget(lambda key: any(address == source for source, *_ in key[1]))

    def forget_pool(self, epoch: int) -> None:
        """Forgets the routes to one of our own pools, which is gone."""
        self._routes.forget(lambda key: key[0] == epoch)

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

    def sources(self, pull: Pull) -> Sources | None:
        """See `KnownRoutes.find`; by the views that the pull has of its producers."""
        return self._routes.find(pull)

    @property
    def routes(self) -> int:
        """How many routes are kept."""
        return len(self._routes)
