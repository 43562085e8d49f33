"""Which server gets a request: the one with the fewest in flight, then the one whose last turn is longest ago."""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from kvd.router.engines import Engine, Place, place
from kvd.router.limits import AFFINITY_REQUESTS, LONGEST_REST_SECONDS, REST_SECONDS


@dataclass(eq=False, slots=True)
class Server:
    """A server at a place that prefills or decodes: its `role`."""

    role: str
    place: Place
    in_flight: int = 0
    turn: int = 0
    """When it was last chosen, counted in choices."""
    rests_until: float = 0.0
    """Monotonic time until which it is chosen only if there is no other, since it failed."""
    failures: int = 0
    """Since it last served a request: how often it failed after it had rested."""

    @property
    def url(self) -> str:
        """http://host:port."""
        return self.place.url

    @property
    def engine(self) -> Engine:
        """What runs there."""
        return self.place.engine

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.role} server {self.url}"

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Counts one request as in flight."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Servers:
    """The servers of one role, at URLs that `kvd.router.engines.place` reads."""

    def __init__(self, role: str, urls: Sequence[str]) -> None:
        self.role = role
        self.all = tuple(Server(role, place(url)) for url in urls)
        self._turns = 0

    def have(self, engine: Engine) -> bool:
        """Whether one of them runs it."""
        return any(server.engine is engine for server in self.all)

    def choose(self, now: float, *, tried: Collection[Server] = (), known_by: Server | None = None) -> Server | None:
        """The server for a request at the monotonic time `now`; None if all were `tried`.

        `known_by` has served the beginning of this prompt and is chosen unless it rests or is much busier than others.
        """
        left = [server for server in self.all if server not in tried]
        if not left:
            return None
        awake = [server for server in left if server.rests_until <= now] or left
        chosen = min(awake, key=lambda server: (server.in_flight, server.turn))
        if known_by in awake and known_by.in_flight <= chosen.in_flight + AFFINITY_REQUESTS:
            chosen = known_by
        self._turns += 1
        chosen.turn = self._turns
        return chosen


def rest(server: Server, now: float) -> None:
    """Notes that it failed at the monotonic time `now`: it rests, each time for twice as long until it serves again."""
    if now < server.rests_until:
        return  # for another one of the requests that it failed at once
    server.failures += 1
    pause = REST_SECONDS * 2.0 ** min(server.failures - 1, 10)
    server.rests_until = now + min(pause, LONGEST_REST_SECONDS)


def ask(server: Server, now: float) -> float:
    """Notes that it gets a request. If it has failed and rested, that one finds out whether it still does.

    Returns until when others wait for that; 0 if there is nothing to find out.
    """
    if not server.failures or now < server.rests_until:
        return 0.0
    rest(server, now)
    return server.rests_until


def unknown(server: Server, until: float) -> None:
    """Notes that the request for which others wait `until` then has found out nothing: the next one does."""
    if server.rests_until == until:  # no other request has
        server.failures, server.rests_until = server.failures - 1, 0.0


def served(server: Server) -> None:
    """Notes that it served a request."""
    server.failures, server.rests_until = 0, 0.0
