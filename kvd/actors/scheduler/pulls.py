"""The scheduler's records: a pull, and its transfers, one for each producer rank that it reads from or reports to."""

from msgspec import Struct, field

from kvd import limits
from kvd.actors.runtime.blocks import Size
from kvd.actors.runtime.records import PeerView, Pool
from kvd.actors.runtime.spans import PullSpan, TransferSpan
from kvd.actors.scheduler.routes import Source, is_large, plan_read
from kvd.plan import Descriptors
from kvd.protocol.peer import Grant
from kvd.protocol.ticket import Ticket, TicketRank, stamp
from kvd.protocol.types import Message, Spans
from kvd.state import pull as pull_machine
from kvd.state import transfer as machine

PullKey = tuple[str, str]
"""(worker, request)."""


class Transfer(Struct, eq=False):
    """What one producer rank contributes. `number` names its claim to the producer and its read to the transport."""

    number: int
    pull: "Pull"
    source: Source
    rank: TicketRank
    """The producer rank, as the ticket names it."""
    state: machine.State = machine.TABLE.initial
    generation: int = 0
    """Of the lease, once it is known."""
    descriptors: Descriptors | None = None
    """What to read, once it is planned."""
    planned: int = 0
    """How many of them are counted as its user's."""
    planning: object = None
    """Names the plan that is being made of it on a thread; None if none is."""
    early_grant: Grant | None = None
    """Speaks of a pool that the peer has not told us about yet."""
    stamp: int = 0
    """What the lease's word holds while the lease is alive; 0 if it is not read."""
    claimed: bool = False
    """The producer was asked to hold the lease."""
    granted: bool = False
    """The producer holds the lease for this claim."""
    released: bool = False
    """The producer was told that the claim is not wanted any more."""
    unanswered: Message | None = None
    """What the producer has not answered yet; it is sent again if the answer is late."""
    settled_by: float = 0.0
    """When the producer is no longer told that a reader has finished; seconds on the loop's clock."""
    span: TransferSpan | None = None

    @property
    def address(self) -> str:
        """Of the producer's daemon."""
        return self.rank.address

    @property
    def view(self) -> PeerView:
        """The producer's daemon, as it was when the pull was routed."""
        return self.pull.views[self.address]

    @property
    def incarnation(self) -> int:
        """The run of the producer's daemon that told us about the pool."""
        return self.view.incarnation

    @property
    def is_stamped(self) -> bool:
        """Whether the lease's stamp can show, before anything is read, that the ticket is right.

        The ticket must name a lease of the very pool that the producer's daemon has told us about.
        """
        rank, pool = self.rank, self.source.pool
        named = rank.generation != 0 and (rank.incarnation, rank.epoch) == (self.incarnation, pool.epoch)
        return named and rank.stamp != 0 and self.view.stamps != 0

    def plan(self) -> Descriptors:
        """The descriptors of its read, worked out the first time.

        Raises:
            KvdError: the blocks cannot be planned (`kvd.actors.scheduler.routes.plan_read`).

        """
        if self.descriptors is None:
            pull = self.pull
            self.descriptors = plan_read(self.source, pull.ticket, pull.blocks, len(pull.pool.spec.groups))
        return self.descriptors

    @property
    def is_large(self) -> bool:
        """Whether the loop should not plan it."""
        return is_large(self.source, self.pull.blocks)

    def expect_stamp(self) -> int:
        """The address of the lease's stamp, and notes what is to be found there; 0 if there is none to be read."""
        ticket, rank, stamps = self.pull.ticket, self.rank, self.view.stamps
        if not stamps or not rank.stamp:
            return 0
        self.stamp = stamp(rank.secret, self.generation, ticket.proof(rank), self.source.pool.epoch)
        return stamps + (rank.stamp - 1) * limits.STAMP_BYTES


class Pull(Struct, eq=False):
    """What a worker asked for; follows `kvd.state.pull`."""

    key: PullKey
    pool: Pool
    ticket: Ticket
    blocks: Spans
    """Those of `pool` that are to be filled."""
    ticket_bytes: int
    """In memory, about: what it has as text, and its spans as they are decoded."""
    consumer: str
    """What producers know it as, together with the pulls of the engine's other ranks."""
    started: float
    awaited: set[str]
    """Addresses of the daemons that it waits for while it is connecting."""
    unasked: set[str]
    """Addresses of the daemons that were ready when it came, and have not been asked for their pools since."""
    hold: bool
    """It only holds its leases."""
    size: Size
    """Of the blocks that are to be filled."""
    state: pull_machine.State = pull_machine.TABLE.initial
    lookups: int = 0
    """How often daemons were asked again because of pools that they had not named."""
    transfers: list[Transfer] = field(default_factory=list)
    views: dict[str, PeerView] = field(default_factory=dict)
    """Its producers' daemons by address, as they were when it was routed: one that has done its part may go."""
    span: PullSpan | None = None

    def reads_from(self, address: str) -> bool:
        """Whether the ticket names a producer rank there."""
        return any(rank.address == address for rank in self.ticket.ranks)
