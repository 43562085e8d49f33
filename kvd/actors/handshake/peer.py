"""What is known of a daemon that we connect to."""

import math
from dataclasses import dataclass, field

import structlog

from kvd.actors.handshake import peer_table as machine
from kvd.actors.handshake.peer_table import LOADED, READY, Event, State
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.pools import PeerPool, PeerView
from kvd.protocol.peer import Ping, Pong, Welcome
from kvd.protocol.status import PeerStatus
from kvd.transport.interface import PeerAdded
from kvd.transport.path import Kind, kind_of, why_slow

_log = structlog.get_logger("kvd.handshake")

MISSED_BEATS = 3
"""Heartbeats in a row without a word after which a peer is lost at the next."""

DATA_NETWORK = (
    "look at the network of `unprotected_transport` on both hosts: its link, routes, firewall (`transport_ports`)"
)

_LONGEST_PAUSE = 32
"""Heartbeats: metadata that the transport tries out first costs a process, for a second of a core."""

_REFRESHES = 4
"""In one heartbeat: pools come seldom, and what a hostile peer answers may have us ask again each time."""


@dataclass(slots=True, eq=False)
class Peer:
    """One daemon, at one address, over one link; follows the table of `peer_table`."""

    address: str
    link: int
    silent_from: float
    """When it last said something, at first when it was connected to; times are seconds on the loop's clock."""
    missed: int = 0
    """Heartbeats since it last said something."""
    needed: float = 0.0
    """When it was last needed or sent a request about a lease."""
    wanted_by: dict[str, None] = field(default_factory=dict)
    """The workers whose pulls wait for it."""
    is_greeted: bool = False
    """Whether it was sent a hello since it was connected to, or last lost."""
    is_heeded: bool = False
    """Whether its next welcome or refusal counts: one does for each hello, and for each ping beside requests."""
    worker: str = ""
    """The worker whose pull was the first to need it; empty if it was expected."""
    user: int = 0
    """That of the worker."""
    announced: int = 0
    """How often the scheduler was told that it is ready."""
    state: State = machine.TABLE.initial
    welcome: Welcome | None = None
    pools: dict[str, PeerPool] = field(default_factory=dict)
    reached: PeerAdded | None = None
    """How the transport reached it last."""
    slow: str | None = None
    """Why its path is slower than it should be; None if it is not."""
    early: set[int] = field(default_factory=set)
    """Other links to the same daemon that were told more than this one, which is being refreshed."""
    refreshes: int = 0
    """How often a pull or another link wanted its pools again since its last heartbeat."""
    loss: str = ""
    failures: int = 0
    """How often the transport has failed since it last reached the peer."""
    unreached_from: float | None = None
    """Since when the peer's memory has not been reached; None if it is, or nobody tried."""
    noted: bool = False
    """Whether it was said that messages reach the peer and the transport does not."""
    greeted_from: float = -math.inf
    """When the peer may be greeted again after the last failure."""
    lost_run: tuple[int, int] | None = None
    """Incarnation and `starts` of a peer that the transport lost, and that was greeted at once."""
    believed_from: float = 0.0
    """When it may tell of `lost_run` again."""
    starts: int = 0
    """As in `Welcome`: whose keys to its memory the transport was given last, by this or another link to it."""
    renewed_from: float = -math.inf
    """When other keys of a transport that was started again count again."""
    pings: int = 0
    awaited: int | None = None
    """The number of the last ping, until it is answered."""
    counted: Kind | None = None
    """The kind of path under which the metrics count it."""
    counted_slow: bool = False

    @property
    def agent(self) -> str:
        """The name of its transport agent; empty if the transport does not know it."""
        return self.welcome.agent if self.welcome is not None and self.state in LOADED else ""

    def hears(self, now: float) -> None:
        """It says something."""
        self.silent_from, self.missed = now, 0

    def beat(self, now: float, *, waits: bool) -> bool:
        """Counts a heartbeat; says whether it was silent for as many as it may be, after which the count starts again.

        Those in which it `waits` for its first hello are not counted, nor those until it may be greeted again: nothing
        is sent to it.

        Heartbeats are counted, not seconds: a daemon that stood still for long has one late heartbeat, before it reads
        what its peers said meanwhile, and must not take its own silence for theirs.
        """
        self.refreshes = 0
        asked = now >= self.greeted_from and not waits
        silent = asked and self.missed == MISSED_BEATS
        self.missed = self.missed + 1 if asked and not silent else 0
        return silent

    def is_refreshed_at_once(self) -> bool:
        """Whether it is asked for its pools now, and not by its next heartbeat; counts it."""
        self.refreshes += 1
        return self.refreshes <= _REFRESHES

    @property
    def metadata(self) -> bytes:
        """What it was told last of how to reach its memory."""
        return self.welcome.metadata if self.welcome is not None else b""

    def ping(self) -> Ping:
        """The next one."""
        self.pings += 1
        self.awaited = self.pings
        return Ping(self.pings)

    def answered(self, pong: Pong, now: float, heartbeat: float) -> Event | None:
        """What the answer to the last ping tells: another run than the welcome, or other keys than the transport has.

        Other keys count once in a while only: to take them in may take a second of a core, and peers are not trusted.
        """
        if pong.number != self.awaited or self.welcome is None:
            return None
        self.awaited = None
        if pong.incarnation != self.welcome.incarnation:
            return Event.RESTARTED
        far = self.state in READY and self.reached is not None and not self.reached.same_host
        if not far or pong.starts <= self.starts or now < self.renewed_from:
            return None
        self.renewed_from = now + heartbeat * _LONGEST_PAUSE
        return Event.UNREACHABLE

    def failed(self, now: float, heartbeat: float) -> None:
        """The transport lost it or could not reach it: it is greeted after a pause, longer each time.

        One that was ready is greeted at once, unless that was done less than a heartbeat ago.
        """
        self._unreached(now)
        at_once = self.state in READY and now - self.greeted_from >= heartbeat
        self.greeted_from = now if at_once else now + heartbeat * min(1 << self.failures, _LONGEST_PAUSE)
        self.lost_run, self.believed_from = _run_of(self.welcome) if at_once else None, now + heartbeat
        self.failures += 1

    def awaits(self, welcome: Welcome, now: float) -> bool:
        """Whether this welcome is an answer to a hello, and of after the last loss.

        We see at once that the connections of a dead process are closed, its daemon hears of its end a moment later.
        Until then the daemon tells of that process, and the next pull would find nobody there. It may tell of other
        pools of it than before, so that metadata do not show whether they are of another one.
        """
        stale = _run_of(welcome) == self.lost_run and now < self.believed_from
        return self.state in (State.GREETING, State.REFRESHING) and not stale

    def note_unreached(self, now: float, context: ActorContext) -> None:
        """Says that the network of the data has failed, or the transport at its other end."""
        seconds = now - self._unreached(now)
        who = f"{self.welcome.daemon if self.welcome else 'a daemon'} at {self.address}"
        text = f"{who} answers messages, and its memory is not reached ({self.loss}); {DATA_NETWORK}"
        if not self.noted:
            context.metrics.peers_unreached.inc()
            _log.warning("peer not reached for reading", peer=self.address, reason=self.loss, seconds=round(seconds, 1))
        self.noted = True
        context.note(f"peer {self.address}", text, seconds)

    def _unreached(self, now: float) -> float:
        """Since when its memory has not been reached: from now on, if it was."""
        self.unreached_from = now if self.unreached_from is None else self.unreached_from
        return self.unreached_from

    def unnote(self, context: ActorContext) -> None:
        """It is reached again, or messages do not reach it either."""
        if self.noted:
            context.metrics.peers_unreached.dec()
            context.note(f"peer {self.address}", None, 0.0)
            _log.info("peer no longer noted as not reached", peer=self.address)
        self.noted = False

    def avoided(self, now: float, heartbeat: float) -> bool:
        """Whether it has failed repeatedly and is greeted in more than a heartbeat: no pull should wait for it."""
        return self.failures > 1 and self.greeted_from - now > heartbeat

    @property
    def path(self) -> str:
        """What carries its bytes (`kvd.transport.path`); empty if that is not known."""
        return self.reached.path if self.reached is not None else ""

    def reached_by(self, event: PeerAdded, context: ActorContext) -> None:
        """Notes the path to it, and warns when it becomes slow."""
        self.failures, self.unreached_from = 0, None
        self.unnote(context)
        settings, welcome, path = context.settings, self.welcome, event.path
        slow = why_slow(path, rdma_here=settings.rdma)
        if welcome is not None and bool(settings.host) and welcome.host == settings.host and not event.same_host:
            slow = f"it is on this host, but NIXL reads it as if from another one: {event.detour}"
        if slow and not self.slow:
            context.metrics.slow_paths.labels(kind_of(path)).inc()
            _log.warning("slow path", peer=self.address, path=path, reason=slow)
        self.reached, self.slow = event, slow

    def forgotten(self) -> None:
        """The transport does not know its agent any more."""
        self.welcome = self.awaited = None

    def enter(self, state: State, context: ActorContext) -> None:
        """Another state, or the same with another path: the metrics count it by both, until it is closed."""
        if state is not self.state:
            for entered, change in ((self.state, -1), (state, +1)):
                if entered is not State.CLOSED:
                    context.metrics.peers.labels(entered).inc(change)
        self.state = state
        if state is not State.LOADING:  # of which it is not known yet what it leads to
            self._count_path(context)

    def _count_path(self, context: ActorContext) -> None:
        """Moves it in the metrics to the path by which it can be read from now, if it can."""
        metrics = context.metrics
        kind, slow = (kind_of(self.path), bool(self.slow)) if self.state in READY else (None, False)
        for counted, change in ((self.counted, -1), (kind, +1)):
            if counted is not None:
                metrics.peer_paths.labels(counted).inc(change)
        metrics.peers_slow.inc(slow - self.counted_slow)
        self.counted, self.counted_slow = kind, slow

    def view(self) -> PeerView:
        """What the scheduler needs to know of it, once it is loaded."""
        welcome, reached = self.welcome, self.reached
        assert welcome is not None  # noqa: S101 - only a loaded peer is announced
        assert reached is not None  # noqa: S101 - the same
        return PeerView(
            self.address,
            welcome.daemon,
            welcome.incarnation,
            welcome.agent,
            self.pools,
            same_host=reached.same_host,
            stamps=int.from_bytes(welcome.stamps, "little") if reached.stamps else 0,
        )

    def report(self, now: float) -> PeerStatus:
        """Its entry in a status."""
        return PeerStatus(
            address=self.address,
            daemon=self.welcome.daemon if self.welcome else None,
            state=self.state,
            silent_seconds=round(now - self.silent_from, 3),
            path=self.path,
            slow=self.slow,
            last_loss=self.loss,
            unreached_seconds=None if self.unreached_from is None else round(now - self.unreached_from, 3),
            incarnation=self.welcome.incarnation if self.welcome else None,
        )


def _run_of(welcome: Welcome | None) -> tuple[int, int] | None:
    """What is another one after the daemon, or its transport to other hosts, was started again."""
    return None if welcome is None else (welcome.incarnation, welcome.starts)
