"""What the router counts, for Prometheus; labels are of bounded number: outcomes, roles and the servers' URLs."""

from collections.abc import Iterable
from enum import StrEnum
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

import kvd
from kvd.router.servers import Server

_TIMES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Outcome(StrEnum):
    """How a client's request ended."""

    DONE = "done"
    REFUSED = "refused"
    """With a 4xx, by a server or by the router."""
    OVERLOADED = "overloaded"
    FAILED = "failed"
    """With a 5xx, before the first byte of an answer."""
    BROKEN_OFF = "broken_off"
    """After it."""
    CLIENT_GONE = "client_gone"


class Turn(StrEnum):
    """What became of a conversation's turn."""

    KEPT = "kept"
    """A decode server keeps it, and gave its parameters."""
    NOT_KEPT = "not_kept"
    FOUND = "found"
    """The next turn's prefill got the parameters."""
    MISSED = "missed"
    """It had none: they did not come in time."""
    EXPIRED = "expired"
    """It came too late."""


class Metrics:
    """The metrics of one router between `servers`, in a registry of their own."""

    def __init__(self, servers: Iterable[Server]) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "kvd_router_requests",
            f"Requests that ended, by outcome ({', '.join(Outcome)}).",
            ["outcome"],
            registry=registry,
        )
        self.first_token_seconds = Histogram(
            "kvd_router_first_token_seconds",
            "From a request's body to the first bytes of its answer.",
            buckets=_TIMES,
            registry=registry,
        )
        self.retries = Counter(
            "kvd_router_retries", "Requests tried on another server, by what failed.", ["role"], registry=registry
        )
        self.early = Counter(
            "kvd_router_early",
            "Requests that both servers got at once, by outcome (done, again: one after the other in the end).",
            ["outcome"],
            registry=registry,
        )
        self.failures = Counter(
            "kvd_router_server_failures", "Failures of each server.", ["role", "server"], registry=registry
        )
        self.releases = Counter(
            "kvd_router_releases",
            "Offers that no decode server answered for and that were released, by outcome (done, failed).",
            ["outcome"],
            registry=registry,
        )
        self.turns = Counter(
            "kvd_router_turns",
            f"Turns of conversations that decode servers keep, and that were asked for ({', '.join(Turn)}).",
            ["outcome"],
            registry=registry,
        )
        self.kept_turns = Gauge("kvd_router_kept_turns", "Turns whose next one may still come.", registry=registry)
        self.malformed = Counter(
            "kvd_router_malformed",
            "Requests that are no HTTP, or have a header that says nothing; answered with status 400.",
            registry=registry,
        )
        in_flight = Gauge("kvd_router_in_flight", "Requests in flight.", ["role", "server"], registry=registry)
        for server in servers:
            in_flight.labels(server.role, server.url).set_function(partial(getattr, server, "in_flight"))
            self.failures.labels(server.role, server.url)
        for outcome in Outcome:
            self.requests.labels(outcome)
        for turn in Turn:
            self.turns.labels(turn)
        for early in ("done", "again"):
            self.early.labels(early)
        Info("kvd_build", "Which kvd this is.", registry=registry).info({"version": kvd.__version__})
