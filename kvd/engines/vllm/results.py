"""What the connector's halves say of transfers after each step, and count until `stats` shows it."""

from dataclasses import dataclass, field


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
