"""The scheduler's records: a pull, and the transfers that it has of each producer rank."""

from msgspec import Struct, field

from kvd import limits
from kvd.actors.runtime.messages import PeerView, Pool
from kvd.actors.runtime.spans import PullSpan, TransferSpan
from kvd.actors.scheduler.routes import Source, plan_read
from kvd.plan import Descriptors
from kvd.protocol.peer import Grant
from kvd.protocol.ticket import Ticket, TicketRank, stamp
from kvd.protocol.types import Message, Spans
from kvd.state import transfer as machine
from kvd.state.transfer import State

PullKey = tuple[str, str]
"""(worker, request)."""


class Transfer(Struct, eq=False):
    """What one producer rank contributes. `number` names its claim to the producer and its read to the transport."""

    number: int
    pull: "Pull"
    source: Source
    address: str
    direct: bool
    """The last read of this peer reached its memory without its transport: it is of the same host."""
    state: State = machine.TABLE.initial
    generation: int = 0
    descriptors: Descriptors | None = None
    planned: bool = False
    early_grant: Grant | None = None
    """Speaks of a pool that the peer has not told us about yet."""
    bytes: int = 0
    stamp: int = 0
    """What the lease's word holds while it is alive; 0 where it is not read."""
    claimed: bool = False
    """The producer was asked to hold the lease."""
    granted: bool = False
    """And does."""
    writing: bool = False
    """A read is open: its blocks are in quarantine should the pull end."""
    ask: Message | None = None
    """What the producer has not answered yet: sent again when the answer is late."""
    settled_by: float = 0.0
    """Until when the producer is told of a read that was proven without it; seconds on the loop's clock."""
    span: TransferSpan | None = None

    @property
    def rank(self) -> TicketRank:
        """The producer rank, as the ticket names it."""
        return self.pull.ticket.ranks[self.source.rank]

    @property
    def incarnation(self) -> int:
        """The run of the producer's daemon that told us about the pool."""
        return self.pull.views[self.address].incarnation

    @property
    def claims_late(self) -> bool:
        """Whether it may read before it claims: the ticket names the lease, and its memory is of this host."""
        rank = self.rank
        known = (self.incarnation, self.source.pool.epoch)
        return self.direct and bool(rank.generation) and (rank.incarnation, rank.epoch) == known

    def plan(self) -> None:
        """Works the descriptors out, the first time.

        Raises:
            KvdError: the blocks cannot be planned (`kvd.actors.scheduler.routes.plan_read`).

        """
        if self.planned:
            return
        self.planned = True
        pull = self.pull
        self.descriptors = plan_read(self.source, pull.ticket, pull.spans, len(pull.pool.spec.groups))
        self.bytes = self.descriptors.bytes if self.descriptors else 0

    def expect_stamp(self) -> int:
        """Where the lease's stamp is to be read, 0 where a message must prove that it was held."""
        ticket, rank = self.pull.ticket, self.rank
        stamps = self.pull.views[rank.address].stamps
        if not self.direct or not stamps or not rank.stamp:
            return 0
        self.stamp = stamp(rank.secret, self.generation, ticket.proof(rank))
        return stamps + (rank.stamp - 1) * limits.STAMP_BYTES


class Pull(Struct, eq=False):
    """What a worker asked for."""

    key: PullKey
    pool: Pool
    ticket: Ticket
    spans: Spans
    ticket_bytes: int
    """As text."""
    started: float
    awaited: set[str]
    """Addresses of peers that must be ready before the pull can be routed."""
    unasked: set[str]
    """Of those that were ready when it came, and have not been asked for their pools since."""
    transfers: list[Transfer] = field(default_factory=list)
    outcome: str = ""
    quarantined: bool = False
    looks: int = 0
    """How often the peers' pools were looked through."""
    views: dict[str, PeerView] = field(default_factory=dict)
    """The producers as they were when the pull was routed: one that has done its part may be gone since."""
    span: PullSpan | None = None
    consumer: str = ""
    """What producers know it as, together with those of the engine's other ranks."""

    def asks(self, address: str) -> bool:
        """Whether one of its producer ranks is there."""
        return any(rank.address == address for rank in self.ticket.ranks)
