"""What the halves of the connector tell each other, and what each counts until `stats` shows it. Plain data."""

from dataclasses import dataclass, field
from typing import TypeAlias

from kvd.client import Blocks


@dataclass(frozen=True, slots=True)
class RankEndpoint:
    """Where consumers find one rank's offers, as tickets name it. `incarnation` is 0 while unknown."""

    daemon: str
    address: str
    incarnation: int
    pool: str


@dataclass(frozen=True, slots=True)
class OfferOrder:
    """Offer these blocks of a request that has ended; vLLM keeps a prefill's until the request is reported as sent."""

    request: str
    offer: str
    tokens: int
    blocks: tuple[Blocks, ...]
    secret: bytes = field(repr=False)
    """The ticket's secret, drawn here because the ticket is made before the daemons know of the offer."""
    consumers: int = 1
    """How many consumers will pull it; 0 for any number."""
    turn_ttl: float = 0.0
    """Seconds for which a conversation's next turn may pull it; 0 if it is a prefill's, whose blocks vLLM keeps."""


@dataclass(frozen=True, slots=True)
class PullOrder:
    """Pull these blocks.

    If the request does not wait (`waits`), there are none, and the pull only lets the producer free its own. `refused`
    says why the ticket cannot be used: the request then fails like any other load.
    """

    request: str
    pull: str
    """Unique to engine and request, and the same on all ranks: the producer counts it as one consumer."""
    ticket: str = field(repr=False)
    blocks: tuple[Blocks, ...]
    waits: bool
    refused: str = ""
    consumer: str = ""
    """The request's hold, if there was one: the producer takes both for one consumer."""
    grows: bool = False
    """The prefill goes on meanwhile, for however long."""


@dataclass(frozen=True, slots=True)
class HoldOrder:
    """Have the producer hold its blocks until the pull of this request has ended: the request has no blocks yet."""

    request: str
    hold: str
    """Unique as a pull is; it is also what the producer counts as the consumer, with the request's later pull."""
    ticket: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class OpenOrder:
    """Open an offer that grows, for a request that is to be prefilled."""

    request: str
    offer: str
    secret: bytes = field(repr=False)
    consumers: int


@dataclass(frozen=True, slots=True)
class ExtendOrder:
    """When the step's kernels have ended, the first `tokens` tokens are complete in all blocks that the offer has."""

    request: str
    offer: str
    tokens: int
    blocks: tuple[Blocks, ...]
    closes: bool = False
    """The prefill has ended: these are the last blocks. VLLM keeps all until the request is reported as sent."""


@dataclass(frozen=True, slots=True)
class WithdrawOrder:
    """End an offer that grows: its blocks are not the request's any more."""

    request: str
    offer: str


GrowingOrder: TypeAlias = OpenOrder | ExtendOrder | WithdrawOrder


@dataclass(slots=True)
class StepMetadata:
    """All orders of one step."""

    holds: list[HoldOrder] = field(default_factory=list)
    pulls: list[PullOrder] = field(default_factory=list)
    offers: list[OfferOrder] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    """Pulls of aborted requests; vLLM keeps their blocks until the request is reported as received."""
    growing: list[GrowingOrder] = field(default_factory=list)
    """Of offers that grow, in their order."""
    withdrawals: list[str] = field(default_factory=list)
    """Offers of turns that are given up."""


@dataclass(slots=True)
class TransferCounts:
    """What a worker counted since its last report; the lists have an entry for each pull that brought blocks."""

    pull_seconds: list[float] = field(default_factory=list)
    """From the scheduler's request to the step that sees the end."""
    pull_blocks: list[int] = field(default_factory=list)
    pull_bytes: list[int] = field(default_factory=list)
    failed_pulls: int = 0
    refused_offers: int = 0
    """Offers that the daemon refused; their requests fail on the decode side."""
    expired_offers: int = 0
    """Offers that nobody claimed in time."""


@dataclass(slots=True)
class Results:
    """What ended since the last step, as vLLM's request ids."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


@dataclass(slots=True)
class TurnCounts:
    """What the scheduler counted since its last report; an entry for each turn of a conversation."""

    turns: list[str] = field(default_factory=list)
    """What became of an earlier turn that a prefill may pull: `pulled`, or why it was computed (`turns`)."""
    kept_turns: list[str] = field(default_factory=list)
    """Why an answer is no longer kept, or was not."""
