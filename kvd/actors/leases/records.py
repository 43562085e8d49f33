"""What the leases actor keeps of an offer, and of a peer's claim on it."""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvd.actors.runtime.blocks import Size
from kvd.actors.runtime.held import Hold
from kvd.actors.runtime.records import Pool
from kvd.actors.runtime.spans import ClaimSpan
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.protocol.peer import Claim
from kvd.protocol.types import Spans
from kvd.state import claim as claim_machine
from kvd.state import lease as lease_machine

NOT_HELD: Final = refusal(ErrorCode.LEASE_BROKEN, "this daemon knows no such claim (any more)")

OfferKey = tuple[str, str]
"""(worker, offer)."""


class ClaimKey(NamedTuple):
    """A claim of a peer: its routing id, which is new with each incarnation, and its number."""

    sender: bytes
    claim: int


@dataclass(slots=True, eq=False)
class ClaimRecord:
    """One claim, which follows `kvd.state.claim`."""

    key: ClaimKey
    peer: str
    """Whose it is: the same for all runs and links of one daemon."""
    request: Claim
    span: ClaimSpan | None
    """None if it is not traced."""
    state: claim_machine.State = claim_machine.TABLE.initial
    lease: "Lease | None" = None
    """The lease that it holds, or held to its fence."""
    error: KvdError = NOT_HELD
    """Why it was broken."""

    def is_of(self, generation: int) -> bool:
        """Whether it holds the lease of this generation, or held it to its fence."""
        return self.lease is not None and self.lease.generation == generation

    @property
    def offer(self) -> OfferKey:
        """The offer that it is about."""
        return (self.request.pool, self.request.offer)


@dataclass(slots=True, eq=False)
class Lease:
    """What was promised with one offer; follows `kvd.state.lease`. `expires` is in seconds on the loop's clock."""

    key: OfferKey
    pool: Pool
    generation: int
    proof: bytes = field(repr=False)
    """What a claim has to show."""
    blocks: Spans
    """Those that it holds, until it ends."""
    size: Size
    consumers: int
    """How many may finish before it ends, 0 for any number."""
    expires: float
    stamp: int
    """The word that holds its stamp while it is alive, 0 for none."""
    state: lease_machine.State = lease_machine.TABLE.initial
    counted: Hold | None = None
    """As what its blocks are counted."""
    reason: str = ""
    """Why it ended, in the words of `Released.reason`."""
    claims: dict[ClaimKey, ClaimRecord] = field(default_factory=dict)
    """Those that are held."""
    finished: dict[str, int] = field(default_factory=dict)
    """Readers that have finished, by consumer, as bits; not kept if consumers are not counted."""
    done: set[str] = field(default_factory=set)
    """Consumers all of whose readers have finished."""

    def finish(self, claim: Claim) -> None:
        """One reader has all it wanted."""
        if self.consumers:
            readers = self.finished.get(claim.consumer, 0) | 1 << claim.reader
            self.finished[claim.consumer] = readers
            if readers.bit_count() >= claim.readers:
                self.done.add(claim.consumer)

    @property
    def is_read(self) -> bool:
        """Whether as many consumers have finished as it was offered to, and no other holds a claim."""
        enough = 0 < self.consumers <= len(self.done)
        return enough and all(claim.request.consumer in self.done for claim in self.claims.values())
