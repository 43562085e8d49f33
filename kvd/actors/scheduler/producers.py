"""What is known of the daemons that pulls read from, and how their pools feed those of this daemon."""

from kvd.actors.runtime.messages import PeerView
from kvd.actors.scheduler.pulls import Pull
from kvd.actors.scheduler.routes import RouteKey, Source, make_route, route_key
from kvd.errors import BadRequest, ErrorCode
from kvd.protocol.ticket import Ticket


class Producers:
    """Peers that are ready, by address, and routes from them: worked out once, used by every pull."""

    def __init__(self) -> None:
        self._views: dict[str, PeerView] = {}
        self._direct: set[str] = set()
        self._routes: dict[RouteKey, tuple[Source, ...]] = {}

    def __getitem__(self, address: str) -> PeerView:
        return self._views[address]

    def __contains__(self, address: str) -> bool:
        return address in self._views

    def learn(self, view: PeerView) -> None:
        """A peer is ready, or has said anew what pools it has."""
        self._views[view.address] = view

    def forget(self, address: str) -> None:
        """A peer is not ready any more."""
        self._views.pop(address, None)
        self._direct.discard(address)
        self._routes = {
            key: sources for key, sources in self._routes.items() if all(address != source for source, *_ in key[1])
        }

    def forget_pool(self, epoch: int) -> None:
        """One of our own pools is gone."""
        self._routes = {key: sources for key, sources in self._routes.items() if key[0] != epoch}

    def unknown(self, ticket: Ticket) -> set[str]:
        """Where a ticket's ranks are whose daemon is not ready, or is one of before the ticket."""
        known = self._views
        return {
            rank.address
            for rank in ticket.ranks
            if rank.address not in known or rank.incarnation > known[rank.address].incarnation
        }

    def check_names(self, ticket: Ticket) -> None:
        """That the daemons which answer at a ticket's addresses are those that it names.

        Raises:
            BadRequest: `BAD_TICKET`, one is not.

        """
        for rank in ticket.ranks:
            found = self._views[rank.address].daemon
            if found != rank.daemon:
                text = f"the ticket is about {rank.daemon!r} at {rank.address}, where {found!r} answers"
                raise BadRequest(ErrorCode.BAD_TICKET, text)

    def without_pool(self, ticket: Ticket) -> set[str]:
        """Where a ticket's ranks are whose daemon has not named their pool, which may be younger than what it said."""
        return {rank.address for rank in ticket.ranks if rank.pool not in self._views[rank.address].pools}

    @staticmethod
    def may_come(ticket: Ticket, addresses: set[str]) -> bool:
        """Whether the pools that daemons at `addresses` have not named may yet come: the ticket names no incarnation.

        One that does was made when the pool was there, so that it is gone since.
        """
        return all(rank.incarnation == 0 for rank in ticket.ranks if rank.address in addresses)

    def views(self, ticket: Ticket) -> dict[str, PeerView]:
        """Of a ticket's ranks, by address."""
        return {rank.address: self._views[rank.address] for rank in ticket.ranks}

    def sources(self, pull: Pull) -> tuple[Source, ...]:
        """The producer ranks that a pull has to do with, by the views that it has of them.

        Raises:
            KvdError: a pool is gone, or means nothing to the other side.

        """
        key = route_key(pull.pool, pull.ticket.ranks, pull.views)
        if key not in self._routes:
            self._routes[key] = make_route(pull.pool, pull.ticket.ranks, pull.views)
        return self._routes[key]

    def is_direct(self, address: str) -> bool:
        """Whether the last read of this peer reached its memory without its transport: it is on this host."""
        return address in self._direct

    def was_read(self, address: str, *, direct: bool) -> None:
        """How a read of this peer came."""
        (self._direct.add if direct else self._direct.discard)(address)

    @property
    def routes(self) -> int:
        """How many are kept."""
        return len(self._routes)
