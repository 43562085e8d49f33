"""What a worker knows of its blocks, offers and pulls, and checks of what it is told against that.

A worker that is told that blocks are its own again writes over them at once, so that whoever reads them late shows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvd.client import events
from kvd.client.events import Blocks
from kvd.errors import ErrorCode
from kvd.protocol import worker as wire
from tests.simulator.checks.promises import Promise
from tests.simulator.traffic.pieces import Piece
from tests.simulator.virtual.cache import Cache, content
from tests.simulator.virtual.fleet import Daemon
from tests.simulator.virtual.memory import File
from tests.simulator.virtual.world import FATAL, World

_SLACK = 0.05
"""Seconds an outcome may come after its deadline: the daemon must run and the worker be reached."""
_AFTERMATH = 1.2
"""Seconds for which a fault excuses failures: what daemons need to notice that one is silent."""
_HEARD = 0.1
"""Seconds for a message and its answer if none is lost or late."""
_GREETED = 1.0
"""The same where daemons stand still or import slowly: a death is heard of late, and who follows is greeted late."""
_SLOW = frozenset({Piece.STANDSTILLS, Piece.TWO_ADDRESSES, Piece.SEVERAL_HOSTS})
_AT_ONCE = 0.45
"""Seconds within which an impossible pull must fail; no claim has timed out by then."""
SCRAP = 0xEE
"""The byte that a worker writes over blocks it has got back."""


@dataclass(slots=True)
class Pulling:
    """A pull that has not ended, as its worker knows it."""

    sequence: str
    offer: str
    tokens: int
    blocks: tuple[Blocks, ...]
    deadline: float
    began: float
    """When its sequence began."""
    concerned: tuple[str, ...]
    """The daemons and workers involved."""
    trouble: int
    """The worker's and daemon's count of disturbances when it began."""
    stray: bool = False
    """Made wrong on purpose: any outcome but done is right."""
    brief: bool = False
    """A late message may make it fail."""
    sent: float = 0.0
    stale: bool = False
    """Its ticket names a daemon's run that is over: it must fail at once."""
    void: bool = False
    """Its ticket gives no right to read anything: its blocks must stay as they are."""
    outcomes: int = 0
    spoilt: bool = False
    """Cancelled, its offer withdrawn, or given too little time: it may fail."""
    comes_late: Callable[[], bool] = field(default=lambda: False)
    """Whether its ticket came before its offer, whose engine has stood still since: a claim waits for so long only."""


@dataclass(slots=True)
class Offering:
    """An offer that is active, or about to be."""

    blocks: tuple[Blocks, ...]
    answered: Callable[[str], None] | None
    secret: bytes
    stands: bool = False
    ticket: str = ""
    """The daemon's own ticket, which names the lease."""


class Ledger:
    """The ledger of one worker, over all its processes."""

    def __init__(self, world: World, daemon: Daemon, name: str, cache: Cache) -> None:
        self.world = world
        self.daemon = daemon
        self.name = name
        self.cache = cache
        self.trouble = 0
        """Sessions lost, pauses, deaths: what excuses a late outcome."""
        self.on_end: Callable[[str, str], None] = lambda _request, _outcome: None
        self.open_books()

    def open_books(self) -> None:
        """Forgets everything, as a new process does."""
        self.file: File | None = None
        self.free = [list(range(group.num_blocks)) for group in self.cache.spec.groups]
        self.pulls: dict[str, Pulling] = {}
        self.offers: dict[str, Offering] = {}
        self._seen: dict[tuple[tuple[int, int], int], object] = {}

    # --- what the daemon says ---------------------------------------------------------------------------------------

    def check_batch(self, log: tuple[int, int], batch: wire.Notifications) -> None:
        """Promise 4: a number always names the same notification; promise 1: one outcome, in time.

        `log` is what numbers them: a pool of one incarnation. One that was lost, and given again, has another number.
        """
        for number, item in enumerate(batch.items, batch.first):
            known = self._seen.setdefault((log, number), item)
            if known is not item:
                if known != item:
                    self.world.violate(Promise.NOTIFIED, f"{self.name}: notification {number} was {known}, is {item}")
                continue
            if isinstance(item, wire.Done | wire.Failed | wire.Cancelled):
                self._check_outcome(item)
            elif isinstance(item, wire.Freed):
                pulling = self.pulls.get(item.request)
                if pulling is not None and pulling.stray:
                    self.blocks_are_free(item.request)

    def _check_outcome(self, item: wire.Done | wire.Failed | wire.Cancelled) -> None:
        pulling = self.pulls.get(item.request)
        if pulling is None:
            return
        pulling.outcomes += 1
        if pulling.outcomes > 1:
            self.world.violate(Promise.ENDS_ONCE, f"{self.name}: the pull {item.request} has a second outcome, {item}")
        late = self.world.loop.now - self.world.allow(pulling.sent or pulling.began, pulling.deadline)
        if late > _SLACK and self.trouble + self.daemon.pauses == pulling.trouble and not self.world.queues_fill:
            self.world.violate(
                Promise.ENDS_ONCE, f"{self.name}: the outcome of {item.request} comes {late:.3f} s late: {item}"
            )
        if pulling.stray:
            if isinstance(item, wire.Done):
                self.world.violate(
                    Promise.BAD_INPUT, f"{self.name}: the pull {item.request}, whose ticket is wrong, is done"
                )
            elif not item.quarantined:
                self.blocks_are_free(item.request)

    def offer_ended(self, offer: str) -> None:
        """Takes its blocks back."""
        offering = self.offers.pop(offer, None)
        if offering is not None:
            self.give_back(offering.blocks)

    def pull_done(self, request: str, *, given_back: bool) -> None:
        """Promise 2: its blocks hold what was offered, byte by byte; not compared if the worker gave its pool back."""
        pulling = self.pulls[request]
        file = self.file
        assert file is not None
        for part in pulling.blocks:
            tokens = self.cache.spec.groups[part.group].block_tokens
            rows = content(pulling.sequence, part.group, pulling.tokens)
            rows = rows[part.first * tokens : (part.first + len(part.ids)) * tokens]
            if not given_back and not self.cache.check(file.data, part.group, list(part.ids), rows):
                self.world.violate(
                    Promise.FENCED, f"{self.name}: {request} is done, group {part.group} holds other bytes"
                )
        self.blocks_are_free(request)
        self.on_end(request, "done")

    def pull_failed(self, event: events.Failed | events.Cancelled) -> None:
        """Promise 7: there must be a fault that explains it."""
        pulling = self.pulls.get(event.request)
        if pulling is None:
            return
        cause = event.code if isinstance(event, events.Failed) else ErrorCode.CANCELLED
        self.world.note(self.name, "ends", event.request, str(cause))
        calm = pulling.trouble == self.trouble + self.daemon.pauses and not pulling.spoilt
        calm = calm and not (cause == ErrorCode.OVERLOADED and Piece.SMALL_BOUNDS in self.world.pieces)
        calm = calm and not (cause == ErrorCode.OFFER_GONE and pulling.comes_late())
        # It says so from its SIGTERM to its end, which the world's standstills put off.
        calm = calm and not (cause == ErrorCode.SHUTTING_DOWN and self.daemon.draining)
        since = pulling.began - _AFTERMATH
        # Messages that are lost may look like a silent peer. But no pull misses its deadline because of them: whatever
        # is not answered is asked for again, many times.
        excuse = FATAL if cause == ErrorCode.DEADLINE else 1 if pulling.brief else 2
        if cause == ErrorCode.LEASE_BROKEN and Piece.SMALL_BOUNDS in self.world.pieces:
            excuse = 1  # a producer that remembers few claims cannot answer their fences a second time
        if pulling.brief or cause == ErrorCode.DEADLINE:
            calm = calm and not self.world.stood_still(since)  # it lost the time
        heard = _HEARD if self.world.pieces.isdisjoint(_SLOW) else _GREETED
        late = (
            pulling.stale
            and pulling.trouble == self.trouble + self.daemon.pauses
            and self.world.loop.now - pulling.sent > _AT_ONCE
            and not self.world.stood_still(pulling.sent)
            and not any(self.world.faults_since(pulling.sent - heard, name) for name in pulling.concerned)
        )
        if late:
            self.world.violate(Promise.SURVIVES, f"{self.name}: {event} comes late, its daemon's run was over")
        if calm and all(self.world.faults_since(since, name) < excuse for name in pulling.concerned):
            self.world.violate(Promise.SURVIVES, f"{self.name}: {event} though nothing happened to {pulling.concerned}")
        if not event.quarantined:
            self.blocks_are_free(event.request)
        self.on_end(event.request, str(cause))

    def blocks_are_free(self, request: str) -> None:
        """Forbids all writes to the blocks of this pull from here on."""
        pulling = self.pulls.pop(request, None)
        if pulling is None:
            return
        self.lend(pulling.blocks, lent=False)
        if pulling.void:
            self._check_untouched(request, pulling)
        self.give_back(pulling.blocks)

    def _check_untouched(self, request: str, pulling: Pulling) -> None:
        """Promise 6: who has no right ticket gets nothing, not even in a pull that fails."""
        file = self.file
        if file is None or file.ended:
            return
        came = (file.data[self.cache.bytes_of(pulling.blocks)] != SCRAP).sum()
        if came:
            self.world.violate(Promise.BAD_INPUT, f"{self.name}: {came} bytes came of {request}, whose ticket is void")

    def give_back(self, blocks: tuple[Blocks, ...]) -> None:
        """Overwrites the blocks, which are the worker's own again."""
        if self.file is not None:
            self.file.data[self.cache.bytes_of(blocks)] = SCRAP
        for part in blocks:
            self.free[part.group].extend(part.ids)

    def lend(self, blocks: tuple[Blocks, ...], *, lent: bool) -> None:
        """Allows or forbids a transport to write to the blocks."""
        if self.file is not None:
            self.file.writable[self.cache.bytes_of(blocks)] = lent

    # --- blocks -----------------------------------------------------------------------------------------------------

    def take_blocks(self, wanted: list[range]) -> tuple[Blocks, ...] | None:
        """Free blocks for the positions `wanted` of each group; None if there are too few."""
        if any(len(positions) > len(self.free[group]) for group, positions in enumerate(wanted)):
            return None
        taken = []
        for group, positions in enumerate(wanted):
            pool = self.free[group]
            self.world.rng.shuffle(pool)
            ids, self.free[group] = pool[: len(positions)], pool[len(positions) :]
            taken.append(Blocks(group, positions.start, ids))
        return tuple(taken)

    def take_again(self, before: tuple[Blocks, ...]) -> tuple[Blocks, ...] | None:
        """The same blocks as `before`; None if one is not free."""
        if any(not set(part.ids) <= set(self.free[part.group]) for part in before):
            return None
        for part in before:
            self.free[part.group] = [block for block in self.free[part.group] if block not in part.ids]
        return before

    def give_up_strays(self) -> None:
        """Gives up pulls whose daemon is gone or whose time is over, as the core does with its own."""
        for request in [request for request, pulling in self.pulls.items() if pulling.stray]:
            self.blocks_are_free(request)
