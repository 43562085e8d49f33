"""A transfer: what one producer rank contributes to one pull. Runs at the consumer's daemon.

The rules, which the table below makes precise:

- Nothing is read before the ticket is known to be right: the lease is granted, or its stamp was found before the first
  byte. A transfer is held only by a fence that was sent after the last byte landed, or by the stamp, read after it.
  Anything else ends in `ended`, and its pull in failure.
- Its read is open while it is `reading` or `draining`, whatever became of the pull: only the transport's own events
  (`landed`, `part`, `next`, `stamped`, `unproven`, `broke`; `left` may stand for each) end that.
- A large read is planned part by part, and each part is read while the next one is planned; the last one is as a read
  that is planned at once.
- An offer that grows is read part by part, each after the one before it; the last one lands after the offer was closed.
  Only that one is fenced, by a proof over all blocks that the producer told of.
- The claim of a pull that has not ended is released only after the read has ended. Of one that has ended it is released
  when the read has, or when that takes long: nobody will use what the read brings.
"""

from enum import StrEnum
from typing import TYPE_CHECKING

from msgspec import Struct

from kvd import limits
from kvd.actors.runtime.machine import Step, Table
from kvd.actors.runtime.pools import PeerView
from kvd.actors.runtime.spans import TransferSpan
from kvd.actors.scheduler.routes import Source, Told, is_large, plan_read
from kvd.errors import KvdError
from kvd.plan import Descriptors, Section
from kvd.protocol.peer import Grant
from kvd.protocol.ticket import TicketRank, proof, stamp
from kvd.protocol.types import Message

if TYPE_CHECKING:
    from kvd.actors.scheduler.pull import Pull


class State(StrEnum):
    """What the transfer waits for."""

    NEW = "new"
    """its pull, which begins all its transfers together"""
    CLAIMING = "claiming"
    """the producer's grant"""
    HOLDING = "holding"
    """its pull's end: it reads nothing, and its claim is renewed until then"""
    FOLLOWING = "following"
    """word from the producer that the offer has grown, or was closed; all that is known of it is read"""
    PLANNING = "planning"
    """the plan of its read, or of the next part of it, which takes longer than what came before"""
    READING = "reading"
    """the last byte"""
    FENCING = "fencing"
    """the producer's answer that the lease was held"""
    DRAINING = "draining"
    """the end of its read, after the pull has ended"""
    SETTLING = "settling"
    """the producer's answer that it knows of the read; all bytes are here and proven already"""
    LEAVING = "leaving"
    """the producer's answer that it knows that no reader will come; it contributed nothing"""
    DONE = "done"
    """nothing: all bytes are here and proven"""
    ENDED = "ended"
    """nothing: it contributed nothing"""


class Event(StrEnum):
    """What happened."""

    BEGIN = "begin"
    """the lease must be claimed before it is read"""
    KNOWN = "known"
    """it begins, and the lease's stamp will show that the ticket is right: a grant would say nothing new"""
    LASTS = "lasts"
    """an unclaimed read goes on for so long that its lease should be claimed"""
    GRANTED = "granted"
    UNPLANNED = "unplanned"
    """granted, or grown, and its read is not planned yet"""
    PLANNED = "planned"
    HOLD = "hold"
    """granted, to a pull that only holds the lease"""
    GROWS = "grows"
    """granted, and the blocks of the offer are told by and by"""
    GREW = "grew"
    """the producer has told of more blocks, or that the offer is closed; their read is planned"""
    PART = "part"
    """landed, and more is to come"""
    NEXT = "next"
    """a part of the plan has landed, and another one is to be read"""
    REFUSED = "refused"
    """by the producer: it refused the claim or broke the lease; or the peer is lost"""
    LANDED = "landed"
    """the last byte of all"""
    STAMPED = "stamped"
    """landed, and the lease's stamp was found after the last byte"""
    UNPROVEN = "unproven"
    """the stamp was not found before the first byte, and nothing was read"""
    BROKE = "broke"
    """the transport ended the read without all bytes"""
    LEFT = "left"
    """its pull was cancelled, no read is open (any more), and the producer has not granted a claim"""
    PROVEN = "proven"
    """the fence came back: held"""
    STOP = "stop"
    """the pull has ended: cancelled, past its deadline, or another transfer of it failed"""


class Effect(StrEnum):
    """What to do."""

    CLAIM = "claim"
    FOLLOW = "follow"
    """ask the producer for what the offer grows by"""
    READ = "read"
    FENCE = "fence"
    SETTLE = "settle"
    """tell the producer, soon and until it has answered, that this reader has finished"""
    ABORT = "abort"
    """ask the transport to end the read early"""
    RELEASE = "release"
    """tell the producer that the claim is not wanted any more"""
    FAIL = "fail"
    """fail the pull"""
    CONTRIBUTE = "contribute"
    """its bytes are here and proven: the pull may be done"""


_S, _E, _F = State, Event, Effect

OPEN = frozenset({_S.READING, _S.DRAINING})
"""Its read is open: something may write to the pull's blocks."""
READ = frozenset({_S.FOLLOWING, _S.FENCING, _S.SETTLING, _S.LEAVING, _S.DONE, _S.ENDED})
"""Its read, or that of all it knows of, has ended or will not begin."""
TELLING = frozenset({_S.SETTLING, _S.LEAVING})
"""The producer is told that its reader has finished."""
PROVEN = frozenset({_S.SETTLING, _S.DONE})
"""All its bytes are here and proven."""
_ASKING = (_S.CLAIMING, _S.HOLDING, _S.FOLLOWING, _S.PLANNING, _S.FENCING)
"""It has a claim, or asks for one, and no read is open."""
_READ_ENDS = (_E.PART, _E.LANDED, _E.STAMPED, _E.UNPROVEN, _E.BROKE)
"""Its read has ended, however that was."""

TABLE: Table[State, Event, Effect] = Table(
    "transfer",
    initial=_S.NEW,
    final=frozenset({_S.DONE, _S.ENDED}),
    steps={
        (_S.NEW, _E.BEGIN): Step(_S.CLAIMING, (_F.CLAIM,)),
        (_S.NEW, _E.KNOWN): Step(_S.READING, (_F.READ,)),
        (_S.NEW, _E.STOP): Step(_S.ENDED),
        (_S.NEW, _E.LEFT): Step(_S.LEAVING, (_F.SETTLE,)),
        (_S.CLAIMING, _E.GRANTED): Step(_S.READING, (_F.READ,)),
        (_S.CLAIMING, _E.UNPLANNED): Step(_S.PLANNING),
        (_S.CLAIMING, _E.HOLD): Step(_S.HOLDING),
        (_S.CLAIMING, _E.GROWS): Step(_S.FOLLOWING, (_F.FOLLOW,)),
        (_S.CLAIMING, _E.LEFT): Step(_S.LEAVING, (_F.SETTLE,)),
        (_S.FOLLOWING, _E.GREW): Step(_S.READING, (_F.READ,)),
        (_S.FOLLOWING, _E.UNPLANNED): Step(_S.PLANNING),
        (_S.PLANNING, _E.PLANNED): Step(_S.READING, (_F.READ,)),
        **{(state, _E.REFUSED): Step(_S.ENDED, (_F.FAIL,)) for state in _ASKING},
        **{(state, _E.STOP): Step(_S.ENDED, (_F.RELEASE,)) for state in _ASKING},
        (_S.READING, _E.PART): Step(_S.FOLLOWING, (_F.FOLLOW,)),
        (_S.READING, _E.NEXT): Step(_S.PLANNING),
        (_S.READING, _E.LANDED): Step(_S.FENCING, (_F.FENCE,)),
        (_S.READING, _E.LASTS): Step(_S.READING, (_F.CLAIM,)),
        (_S.READING, _E.STAMPED): Step(_S.SETTLING, (_F.CONTRIBUTE, _F.SETTLE)),
        (_S.READING, _E.UNPROVEN): Step(_S.CLAIMING, (_F.CLAIM,)),
        (_S.READING, _E.BROKE): Step(_S.ENDED, (_F.RELEASE, _F.FAIL)),
        (_S.READING, _E.REFUSED): Step(_S.DRAINING, (_F.ABORT, _F.FAIL)),
        (_S.READING, _E.STOP): Step(_S.DRAINING, (_F.ABORT,)),
        (_S.FENCING, _E.PROVEN): Step(_S.DONE, (_F.CONTRIBUTE,)),
        (_S.FENCING, _E.LEFT): Step(_S.LEAVING, (_F.SETTLE,)),
        (_S.SETTLING, _E.PROVEN): Step(_S.DONE),
        # The lease may have ended meanwhile, which does not concern the reader any more.
        (_S.SETTLING, _E.REFUSED): Step(_S.DONE),
        **{(_S.DRAINING, end): Step(_S.ENDED, (_F.RELEASE,)) for end in _READ_ENDS},
        (_S.DRAINING, _E.LEFT): Step(_S.LEAVING, (_F.SETTLE,)),
        (_S.LEAVING, _E.PROVEN): Step(_S.ENDED),
        (_S.LEAVING, _E.REFUSED): Step(_S.ENDED),
    },
    ignored={
        # Answers may come twice, since requests are sent again if an answer is late.
        _S.SETTLING: frozenset({_E.STOP}),
        _S.DRAINING: frozenset({_E.REFUSED, _E.STOP}),
        _S.LEAVING: frozenset({_E.STOP}),
        **dict.fromkeys((_S.DONE, _S.ENDED), frozenset({_E.REFUSED, _E.STOP})),
    },
)


class Transfer(Struct, eq=False):
    """What one producer rank contributes. `number` names its claim to the producer and its read to the transport."""

    number: int
    pull: "Pull"
    source: Source
    rank: TicketRank
    """The producer rank, as the ticket names it."""
    told: Told
    """What is known of its blocks."""
    state: State = TABLE.initial
    generation: int = 0
    """Of the lease, once it is known."""
    parts: tuple[Section, ...] = ()
    """What has not landed, in the order in which it is planned and read; each is read by a read of its own."""
    descriptors: Descriptors | None = None
    """The first part's, once it is planned."""
    ahead: Descriptors | None = None
    """The second part's, once it is planned."""
    planned: int = 0
    """How many of both are counted as its user's."""
    planning: object = None
    """Names the plan that is being made of it on a thread; None if none is."""
    early_grant: Grant | None = None
    """Speaks of a pool that the peer has not told us about yet."""
    stamp: int = 0
    """What the lease's word holds while the lease is alive; 0 if it is not read."""
    asks: bool = False
    """It begins with a claim, which counts for its user until it has ended."""
    claimed: bool = False
    """The producer was asked to hold the lease."""
    granted: bool = False
    """The producer holds the lease for this claim."""
    failing: KvdError | None = None
    """Why its lease is broken, or its producer lost, though its turn to fail may not have come."""
    lost: bool = False
    """Whether its producer is lost."""
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
    def is_stamped(self) -> bool:
        """Whether the lease's stamp can show, before anything is read, that the ticket is right.

        The ticket must name a lease of the very pool that the producer's daemon has told us about.
        """
        rank = self.rank
        named = self.told.whole and rank.generation != 0 and self.view.told_of(self.source.pool, rank)
        return named and rank.stamp != 0 and self.view.stamps != 0

    def plan(self) -> Descriptors:
        """The descriptors of its read, worked out the first time: at once, in one part.

        Raises:
            KvdError: the blocks cannot be planned (`kvd.actors.scheduler.routes.plan_read`).

        """
        if self.descriptors is None:
            whole = self.told.section
            self.parts = (whole,)
            self.descriptors = plan_read(self.source, self.told, whole, self.pull.blocks)
        return self.descriptors

    @property
    def is_large(self) -> bool:
        """Whether the loop should not plan it."""
        return is_large(self.source, self.told, self.pull.blocks, self.pull.pool.spec.groups)

    def has_landed(self) -> Event:
        """What it means that the last part of all it was told of is here."""
        self.told = self.told.landed()
        return Event.LANDED if self.told.whole else Event.PART

    @property
    def proof(self) -> bytes:
        """Over all blocks that it was told of."""
        rank, told = self.rank, self.told
        return proof(rank.secret, rank.pool, rank.offer, told.tokens, told.spans)

    def expect_stamp(self) -> int:
        """The address of the lease's stamp, and notes what is to be found there; 0 if there is none to be read.

        Only the last read looks for it: what is proven is all that was read before.
        """
        word, stamps = self.told.stamp, self.view.stamps
        if not (self.told.whole and stamps and word) or len(self.parts) > 1:
            return 0
        self.stamp = stamp(self.rank.secret, self.generation, self.proof, self.source.pool.epoch)
        return stamps + (word - 1) * limits.STAMP_BYTES
