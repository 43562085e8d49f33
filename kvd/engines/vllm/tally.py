"""What a worker counts of its transfers between two reports to the engine."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Tally:
    """Lists have one entry a pull that brought blocks: seconds from the order to the news, blocks, bytes."""

    pull_seconds: list[float] = field(default_factory=list)
    pull_blocks: list[int] = field(default_factory=list)
    pull_bytes: list[int] = field(default_factory=list)
    failed_pulls: int = 0
    refused_offers: int = 0
    """Offers that the daemon did not take: their requests fail on the decode side."""
    expired_offers: int = 0
    """Offers that nobody claimed in time."""

    def pulled(self, seconds: float, blocks: int, nbytes: int) -> None:
        """A pull is done."""
        self.pull_seconds.append(seconds)
        self.pull_blocks.append(blocks)
        self.pull_bytes.append(nbytes)

    def released(self, reason: str) -> None:
        """An offer has ended."""
        self.expired_offers += reason == "expired"

    def as_dict(self) -> dict[str, Any]:
        """The counts by name."""
        return asdict(self)
