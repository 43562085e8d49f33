"""What the scheduler's half tells the workers to do, and what it has to know of them. Plain data."""

from dataclasses import dataclass, field

from kvd.client import Blocks


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where consumers find one rank's offers: what a ticket says of it. `incarnation` is 0 while nobody knows it."""

    daemon: str
    address: str
    incarnation: int
    pool: str


@dataclass(frozen=True, slots=True)
class OfferOrder:
    """Offer these blocks of a finished prefill, which vLLM keeps until the request is reported as sent."""

    request: str
    offer: str
    tokens: int
    blocks: tuple[Blocks, ...]
    secret: bytes = field(repr=False)
    """Of the ticket, which is made before the daemons know of the offer."""
    consumers: int = 1
    """How many will pull it; 0 for any number."""


@dataclass(frozen=True, slots=True)
class PullOrder:
    """Bring these blocks.

    `waits` says whether the request waits for that; if not there are no blocks, and the point is that the producer
    learns that it can free its own. `refused` says why the ticket cannot be used: the request then fails like any other
    load.
    """

    request: str
    pull: str
    """Unique to this engine and request, the same for its ranks: what the producer counts as one consumer."""
    ticket: str = field(repr=False)
    blocks: tuple[Blocks, ...]
    waits: bool
    refused: str = ""


@dataclass(slots=True)
class Orders:
    """Everything for one step."""

    pulls: list[PullOrder] = field(default_factory=list)
    offers: list[OfferOrder] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    """Pulls of requests that were aborted; vLLM keeps their blocks until the request is reported as received."""
