"""The spans that actors open and close if an operator turns tracing on (`kvd.daemon.tracing`).

A trace begins at the worker, or at its daemon. Pulls carry it on to the consumer's daemon, and claims (or the fence
that stands for one) to the producer's, as the `traceparent` of W3C Trace Context.
"""

from typing import Protocol

from kvd.errors import KvdError
from kvd.protocol.peer import Claim
from kvd.protocol.worker import Pull


class TransferSpan(Protocol):
    """What one producer rank contributes to a pull."""

    @property
    def traceparent(self) -> str:
        """For the claim to carry, so that this span is the parent of the producer's."""

    def enter(self, phase: str) -> None:
        """Ends one phase and begins the next."""

    def end(self, outcome: str) -> None:
        """Ends the last phase, and the span."""


class PullSpan(Protocol):
    """A pull, from its arrival to its outcome."""

    def transfer(self, daemon: str, pool: str) -> TransferSpan:
        """Begins the span of one of its transfers."""

    def end(self, outcome: str, error: KvdError | None) -> None:
        """The pull is `done`, `failed` or `cancelled`."""


class ClaimSpan(Protocol):
    """A peer's claim, from its arrival to the end of its hold on the lease."""

    def granted(self) -> None:
        """The claim holds the lease; until now it may have waited for the offer."""

    def end(self, outcome: str, error: KvdError | None = None) -> None:
        """The claim was `held` to the fence, `refused`, `broken`, or `released` by its consumer."""


class Spans(Protocol):
    """Makes spans."""

    def pull(self, worker: str, pull: Pull) -> PullSpan:
        """Begins the span of a worker's pull."""

    def claim(self, claim: Claim) -> ClaimSpan:
        """Begins the span of a claim that carries a `traceparent`."""
