"""What the actors tell whoever traces requests (`kvd.daemon.tracing`); nobody does unless an operator asks for it.

A trace begins at the worker, or at its daemon. It is carried on as the `traceparent` of W3C Trace Context: by a pull to
the consumer's daemon, and by a claim (or the fence that stands for one) to the producer's.
"""

from typing import Protocol

from kvd.errors import KvdError
from kvd.protocol.peer import Claim
from kvd.protocol.worker import Pull
from kvd.state.transfer import State


class TransferSpan(Protocol):
    """What one producer rank contributes to a pull."""

    @property
    def traceparent(self) -> str:
        """What the claim carries, so that the producer's spans lie under this one."""

    def enter(self, state: State) -> None:
        """One phase ends and the next begins; a final one ends the span."""


class PullSpan(Protocol):
    """A pull, from its arrival to its outcome."""

    def transfer(self, daemon: str, pool: str) -> TransferSpan:
        """One of its transfers begins."""

    def end(self, outcome: str, error: KvdError | None) -> None:
        """The pull is `done`, `failed` or `cancelled`."""


class ClaimSpan(Protocol):
    """A peer's claim, from its arrival to the end of its hold on the lease."""

    def granted(self) -> None:
        """It holds the lease; until now it may have waited for the offer."""

    def end(self, outcome: str, error: KvdError | None = None) -> None:
        """The claim was `held` to the fence, `refused`, `broken`, or `released` by its consumer."""


class Spans(Protocol):
    """Where spans come from."""

    def pull(self, worker: str, pull: Pull) -> PullSpan:
        """A worker's pull has been accepted."""

    def claim(self, claim: Claim) -> ClaimSpan:
        """A claim has come that carries a `traceparent`."""
