"""What everything in a simulated world shares: clock, dice, current faults, and trace."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, fields

import msgspec

from tests.simulator.checks.promises import Promise
from tests.simulator.traffic.pieces import ON, Piece, draw
from tests.simulator.virtual.loop import VirtualLoop
from tests.simulator.virtual.memory import Kernel

_KEPT_VIOLATIONS = 20


@dataclass(slots=True)
class Knobs:
    """How likely each fault is, for each message, read or request. All 0 in a healed world."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    """A message takes up to `LONG_DELAY` and is overtaken by others."""
    read_fails: float = 0.0
    read_slow: float = 0.0
    read_sticks: float = 0.0
    strike: float = 0.0
    """In the middle of a pull, it is cancelled, its offer withdrawn, or a process involved dies or stops."""
    die_while_read: float = 0.0
    """A daemon dies while its memory is being read."""
    transport_dies: float = 0.0
    """A process that reads from other hosts dies during a read."""
    forge: float = 0.0
    """A worker pulls with a ticket that was changed on its way."""
    reuse: float = 0.0
    """In the middle of a pull, its offer is withdrawn, and another made under its name."""
    stand_still: float = 0.0
    """In the middle of a pull, all the world stands still."""
    queue_full: float = 0.0
    """A worker's queue takes no message."""
    add_peer_fails: float = 0.0
    allocation_fails: float = 0.0
    registration_fails: float = 0.0

    def clear(self) -> None:
        for each in fields(self):
            setattr(self, each.name, 0.0)


FATAL = 1000
"""The weight of a fault that may fail a request; a lost message weighs 1."""

_MOMENT = 0.05
"""Seconds that something takes which is about to be done."""

_APART = 0.3
"""Seconds between two standstills."""

LONG_DELAY = 0.8
"""Seconds."""


class World:
    def __init__(self, seed: int, pieces: frozenset[Piece] = ON) -> None:
        self.rng = random.Random(seed)  # noqa: S311 - dice, not secrets
        self.pieces = draw(seed, pieces)
        self.loop = VirtualLoop()
        self.kernel = Kernel()
        self.knobs = Knobs()
        self.cut: set[tuple[str, str]] = set()
        """(from, to): daemons between which nothing arrives."""
        self.violations: list[str] = []
        self.trace: list[tuple[object, ...]] = []
        self._faults: dict[str, list[tuple[float, int]]] = {}
        """Faults of each daemon or worker, its messages and its reads, with their times."""
        self.orderly = False
        """Whether messages between two daemons that arrive do so once and in order."""
        self.queues_fill = False
        """Whether this world has had full workers' queues, which delay notifications."""
        self.pools_end = False
        """Whether kept pools may end: they cannot be registered, or make room for others."""
        self.on_death: Callable[[str], None] = lambda _agent: None
        """Called with the agent whose process is to die."""
        self.on_transport_death: Callable[[str], None] = lambda _agent: None
        """Called with the agent whose process is to die that reads from other hosts."""
        self.standstills: list[tuple[float, float]] = []
        """When nothing ran: from when until when."""
        self.crash: Exception | None = None
        """What was raised outside of any actor."""

    def chance(self, probability: float) -> bool:
        return probability > 0.0 and self.rng.random() < probability

    def stand_still(self, seconds: float) -> None:
        """Nobody gets a processor, and nobody has had a fault; not again before all have caught up."""
        if self.stood_still(self.loop.now - _APART):
            return
        self.note("world", "stands still", seconds)
        began = self.loop.now
        self.loop.stand_still(seconds)
        self.standstills.append((began, self.loop.now))

    def stood_still(self, since: float) -> bool:
        """Whether nothing ran at some time from `since` on."""
        return any(end >= since for _, end in self.standstills)

    def allow(self, since: float, until: float) -> float:
        """Until when something may last that began at `since` and should end at `until`: standstills take no time."""
        for began, end in self.standstills:
            if end >= since and began <= until + _MOMENT:
                until += end - began
        return until

    def note(self, *what: object) -> None:
        """One line of the trace."""
        self.trace.append((self.loop.now, *what))

    def violate(self, promise: Promise, text: str) -> None:
        """Records that a promise is broken."""
        line = f"[{promise}] {text}"
        self.note("VIOLATION", line)
        if len(self.violations) < _KEPT_VIOLATIONS:
            self.violations.append(line)

    def disturb(self, *daemons: str) -> None:
        """Records a fault of these daemons, which excuses failures of their current requests."""
        for daemon in daemons:
            self._faults.setdefault(daemon, []).append((self.loop.now, FATAL))

    def disturb_message(self, *daemons: str) -> None:
        """Records a lost or late message between two daemons; a request must survive one of them."""
        for daemon in daemons:
            self._faults.setdefault(daemon, []).append((self.loop.now, 1))

    def faults_since(self, since: float, name: str) -> int:
        """Faults of a daemon or worker from `since` on."""
        return sum(weight for when, weight in reversed(self._faults.get(name, [])) if when >= since)

    def trace_hash(self) -> str:
        """Equal for equal runs."""
        return hashlib.blake2b(msgspec.msgpack.encode(self.trace), digest_size=16).hexdigest()
