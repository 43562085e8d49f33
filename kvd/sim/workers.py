"""Model workers: each attaches, offers and pulls through the real client's core, and checks what it is told.

A worker that is told that blocks are its own again writes over them at once, so that whoever reads them late shows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvd.client import events
from kvd.client.blocks import Blocks, spans
from kvd.client.core import Core
from kvd.errors import ErrorCode, KvdError, Unavailable
from kvd.protocol import codec
from kvd.protocol import worker as wire
from kvd.protocol.types import Message
from kvd.sim.cache import Cache, content
from kvd.sim.fleet import Daemon
from kvd.sim.loop import Handle, Process
from kvd.sim.memory import File
from kvd.sim.network import Session
from kvd.sim.promises import Promise
from kvd.sim.world import FATAL, World

_SLACK = 0.05
"""Seconds that an outcome may come after its deadline: the daemon's turn and the way to the worker."""
_STEP = 0.008
"""Seconds between two polls of an engine, at most."""
_SCRAP = 0xEE
_AFTERMATH = 1.2
"""Seconds for which a fault may excuse failures: what daemons need to find out that one of them is silent."""


@dataclass(slots=True)
class Pulling:
    """A pull that has not ended, as its worker knows it."""

    sequence: str
    tokens: int
    blocks: tuple[Blocks, ...]
    deadline: float
    began: float
    """When its sequence did."""
    concerned: tuple[str, ...]
    """Daemons and workers that have a part in it."""
    trouble: int
    """What had happened between this worker and its daemon, when it began."""
    stray: bool = False
    """Made wrong on purpose: anything but done is right."""
    outcomes: int = 0
    spoilt: bool = False
    """Cancelled, its offer withdrawn, or given too little time: it may fail."""


@dataclass(slots=True)
class Offering:
    """An offer that stands, or is about to."""

    blocks: tuple[Blocks, ...]
    answered: Callable[[str], None] | None
    stands: bool = False


class Worker:
    """One rank of an engine, through all its processes."""

    def __init__(self, world: World, daemon: Daemon, name: str, cache: Cache) -> None:
        self.world = world
        self.daemon = daemon
        self.name = name
        self.cache = cache
        self.runs = 0
        self.trouble = 0
        """Sessions lost, pauses, deaths: what excuses a late outcome."""
        self.process = Process(world.loop, name)
        self.process.kill()
        self.session: Session | None = None
        self.on_end: Callable[[str, str], None] = lambda _request, _outcome: None

    @property
    def alive(self) -> bool:
        """Whether its process is up."""
        return not self.process.dead

    @property
    def attached(self) -> bool:
        """Whether it can ask for something."""
        return self.alive and not self.process.paused and self._lent

    def start(self) -> None:
        """A new process, which knows nothing of the one before."""
        self.runs += 1
        self.process = Process(self.world.loop, f"{self.name}#{self.runs}")
        self.core = Core(self.name)
        self.descriptor = -1
        self.file: File | None = None
        self.free = [list(range(group.num_blocks)) for group in self.cache.spec.groups]
        self.pulls: dict[str, Pulling] = {}
        self.offers: dict[str, Offering] = {}
        self.calls: dict[int, tuple[Promise, str]] = {}
        """Requests made wrong on purpose: the promise that refuses them, and what each was."""
        self.detaching = False
        self._lent = False
        self._incarnation = 0
        self._seen: dict[tuple[int, int], object] = {}
        self._poll: Handle | None = None
        self._strays = 1 << 40
        self._stray_pulls: dict[int, str] = {}
        """Pulls made past the core, by call."""
        self.world.note(self.name, "starts", self.runs)
        self._connect()

    def crash(self) -> None:
        """SIGKILL."""
        if self.process.dead:
            return
        self.world.note(self.name, "crashes")
        self.world.disturb(self.name)
        self.trouble += 1
        self.process.kill()
        if self.session is not None:
            self.session.hang_up(lose=False)
        self.world.kernel.close_all(self.process.name)

    def pause(self) -> None:
        """SIGSTOP."""
        self.trouble += 1
        self.process.pause()

    def resume(self) -> None:
        """SIGCONT."""
        self.trouble += 1
        self.process.resume()

    # --- the session ------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        daemon = self.daemon
        if not daemon.alive:
            self._connect_later()
            return
        self.session = daemon.worker_port.accept(self.process, self)
        instance = self.process.name.encode().ljust(16, b".")
        kept = (self.descriptor,) if self.descriptor >= 0 else ()
        self.session.send_session(codec.encode(wire.Attach(self.name, instance, self.cache.raw)), kept)

    def _connect_later(self) -> None:
        self.process.call_later(0.02 + self.world.rng.random() * 0.1, self._connect)

    def on_session(self, frame: bytes, descriptors: tuple[int, ...]) -> None:
        """A frame on the session socket."""
        match codec.session_replies.decode(frame):
            case wire.Attached() as attached:
                self._on_attached(attached, descriptors[0])
            case wire.Detached():
                self._on_detached()
            case wire.Refused():
                if self.detaching:
                    self._on_detached()  # it leaves; its pool goes when the last read into it has ended
                elif self.session is not None:
                    self.session.hang_up(lose=False)

    def _on_attached(self, attached: wire.Attached, descriptor: int) -> None:
        kernel, session = self.world.kernel, self.session
        assert session is not None  # noqa: S101 - it came over it
        file = kernel.file(descriptor)
        if self.file is not None and self.file is not file:
            self.world.violate(Promise.SURVIVES, f"{self.name} gets another pool than it had")
        if self.file is None:
            # A successor, or the first: it may do what it likes, so nothing may write there any more.
            file.writable[:] = False
            file.data[:] = _SCRAP
        if self.descriptor >= 0:
            kernel.close(self.descriptor)
        self.descriptor, self.file = descriptor, file
        session.connect_requests(attached.session)
        self._lent = True
        if self._incarnation != attached.incarnation:
            self._incarnation = attached.incarnation
            self.give_up_strays()
        self.core.on_attached(attached)
        self._poll_soon()

    def on_closed(self) -> None:
        """End of file."""
        self.trouble += 1
        self._lent = False
        if self.detaching:
            self._on_detached()
            return
        self.core.on_disconnected(Unavailable(ErrorCode.DAEMON_LOST, "end of file"))
        self._connect_later()

    def detach(self) -> None:
        """Gives the pool back and, once that is done, starts over as another process."""
        if self.session is not None and self.session.open:
            self.world.note(self.name, "detaches")
            self.world.disturb(self.name)
            self.trouble += 1
            self._lent, self.detaching = False, True
            self.session.send_session(codec.encode(wire.Detach()))

    def _on_detached(self) -> None:
        self.crash()
        self.world.loop.call_later(0.01, self.start)

    # --- polling ----------------------------------------------------------------------------------------------------

    def _poll_soon(self) -> None:
        if self._poll is None:
            self._poll = self.process.call_later(self.world.rng.random() * _STEP, self.poll)

    def poll(self) -> None:
        """One step of the engine: takes what has happened, sends what the core has to say."""
        self._poll = None
        now = self.world.loop.now
        self.core.on_time(now)
        for event in self.core.take_events():
            self._handle(event)
        if self._lent and self.session is not None:
            for frame in self.core.take_frames():
                self.session.send(frame)
            if self.core.lost_notifications(now):
                self.session.hang_up(lose=False)
        timer = self.core.next_timer
        if timer < float("inf"):
            self.process.call_later(max(0.0, timer - now), self._poll_soon)

    def on_frame(self, frame: bytes) -> None:
        """A frame on the request socket."""
        reply = codec.worker_replies.decode(frame)
        if isinstance(reply, wire.Notifications):
            self._check_batch(reply)
        elif isinstance(reply, wire.Error):
            self.calls.pop(reply.call, None)
            self._blocks_are_free(self._stray_pulls.pop(reply.call, ""))
        self.core.on_frame(frame, self.world.loop.now)
        self._poll_soon()

    def _check_batch(self, batch: wire.Notifications) -> None:
        """Promise 4: a number always names the same notification; promise 1: one outcome, in time."""
        incarnation = self.core.attached.incarnation
        for number, item in enumerate(batch.items, batch.first):
            known = self._seen.setdefault((incarnation, number), item)
            if known is not item:
                if known != item:
                    self.world.violate(Promise.NOTIFIED, f"{self.name}: notification {number} was {known}, is {item}")
                continue
            if isinstance(item, wire.Done | wire.Failed | wire.Cancelled):
                self._check_outcome(item)
            elif isinstance(item, wire.Freed):
                pulling = self.pulls.get(item.request)
                if pulling is not None and pulling.stray:
                    self._blocks_are_free(item.request)

    def _check_outcome(self, item: wire.Done | wire.Failed | wire.Cancelled) -> None:
        pulling = self.pulls.get(item.request)
        if pulling is None:
            return
        pulling.outcomes += 1
        if pulling.outcomes > 1:
            self.world.violate(Promise.ENDS_ONCE, f"{self.name}: the pull {item.request} has a second outcome, {item}")
        late = self.world.loop.now - pulling.deadline
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
                self._blocks_are_free(item.request)

    # --- what the core says -----------------------------------------------------------------------------------------

    def _handle(self, event: events.Event) -> None:
        match event:
            case events.Offered(offer, ticket):
                offering = self.offers.get(offer)
                if offering is not None:
                    offering.stands = True
                    if offering.answered is not None:
                        offering.answered(ticket)
            case events.OfferRefused(offer) | events.Released(offer):
                self._offer_ended(offer)
            case events.Done(request):
                self._done(request)
            case events.Failed() | events.Cancelled():
                self._not_done(event)
            case events.Freed(request):
                self._blocks_are_free(request)

    def _offer_ended(self, offer: str) -> None:
        offering = self.offers.pop(offer, None)
        if offering is not None:
            self.give_back(offering.blocks)

    def _done(self, request: str) -> None:
        pulling = self.pulls[request]
        file = self.file
        assert file is not None  # noqa: S101 - a worker that pulls has its pool
        for part in pulling.blocks:
            tokens = self.cache.spec.groups[part.group].block_tokens
            rows = content(pulling.sequence, part.group, pulling.tokens)
            rows = rows[part.first * tokens : (part.first + len(part.ids)) * tokens]
            if not self.cache.check(file.data, part.group, list(part.ids), rows):
                self.world.violate(
                    Promise.FENCED, f"{self.name}: {request} is done, group {part.group} holds other bytes"
                )
        self._blocks_are_free(request)
        self.on_end(request, "done")

    def _not_done(self, event: events.Failed | events.Cancelled) -> None:
        pulling = self.pulls.get(event.request)
        if pulling is None:
            return
        cause = event.code if isinstance(event, events.Failed) else ErrorCode.CANCELLED
        self.world.note(self.name, "ends", event.request, str(cause))
        calm = pulling.trouble == self.trouble + self.daemon.pauses and not pulling.spoilt
        since = pulling.began - _AFTERMATH
        # Messages that are lost may look like a silent peer. But no pull misses its deadline because of them: whatever
        # is not answered is asked for again, many times.
        excuse = FATAL if cause == ErrorCode.DEADLINE else 2
        if calm and all(self.world.faults_since(since, name) < excuse for name in pulling.concerned):
            self.world.violate(Promise.SURVIVES, f"{self.name}: {event} though nothing happened to {pulling.concerned}")
        if not event.quarantined:
            self._blocks_are_free(event.request)
        self.on_end(event.request, str(cause))

    def _blocks_are_free(self, request: str) -> None:
        pulling = self.pulls.pop(request, None)
        if pulling is None:
            return
        self._lend(pulling.blocks, lent=False)
        self.give_back(pulling.blocks)

    def give_back(self, blocks: tuple[Blocks, ...]) -> None:
        """The blocks are this worker's own: it uses them for something else."""
        if self.file is not None:
            self.file.data[self.cache.bytes_of(blocks)] = _SCRAP
        for part in blocks:
            self.free[part.group].extend(part.ids)

    def _lend(self, blocks: tuple[Blocks, ...], *, lent: bool) -> None:
        if self.file is not None:
            self.file.writable[self.cache.bytes_of(blocks)] = lent

    # --- requests ---------------------------------------------------------------------------------------------------

    def take_blocks(self, wanted: list[range]) -> tuple[Blocks, ...] | None:
        """Free blocks for the positions `wanted` of each group; None where there are too few."""
        if any(len(positions) > len(self.free[group]) for group, positions in enumerate(wanted)):
            return None
        taken = []
        for group, positions in enumerate(wanted):
            pool = self.free[group]
            self.world.rng.shuffle(pool)
            ids, self.free[group] = pool[: len(positions)], pool[len(positions) :]
            taken.append(Blocks(group, positions.start, ids))
        return tuple(taken)

    def offer(
        self, name: str, tokens: int, blocks: tuple[Blocks, ...], ttl: float, answered: Callable[[str], None] | None
    ) -> bool:
        """Fills the blocks and offers them."""
        assert self.file is not None and self.session is not None  # noqa: S101, PT018
        for part in blocks:
            size = self.cache.spec.groups[part.group].block_tokens
            rows = np.zeros((len(part.ids) * size, content(name, part.group, tokens).shape[1]), np.uint8)
            rows[:tokens] = content(name, part.group, tokens)
            self.cache.fill(self.file.data, part.group, list(part.ids), rows)
        try:
            frame = self.core.offer(name, tokens, blocks, ttl)
        except KvdError:
            self.give_back(blocks)
            return False
        self.offers[name] = Offering(blocks, answered)
        self.session.send(frame)
        return True

    def pull(self, request: str, ticket: str, pulling: Pulling, timeout: float) -> None:
        """Pulls into blocks that were taken for it."""
        assert self.session is not None  # noqa: S101 - only the attached pull
        now = self.world.loop.now
        frame = self.core.pull(request, ticket, pulling.blocks, timeout, now)
        self.pulls[request] = pulling
        self._lend(pulling.blocks, lent=True)
        self.session.send(frame)
        self._poll_soon()

    def cancel(self, request: str) -> None:
        """Cancels a pull or withdraws an offer."""
        if request in self.pulls:
            self.pulls[request].spoilt = True
        try:
            frame = self.core.cancel(request)
        except KvdError:
            return
        assert self.session is not None  # noqa: S101 - the core knows that it is connected
        self.session.send(frame)

    def send_wrong(self, make: Callable[[int], Message], promise: Promise, what: str) -> None:
        """Sends a request that must be refused; `make` gets its call."""
        assert self.session is not None  # noqa: S101 - only the attached send
        self._strays += 1
        self.calls[self._strays] = (promise, what)
        self.session.send(codec.encode(make(self._strays)))

    def pull_wrongly(self, request: str, wrong: str, pulling: Pulling, timeout: float) -> None:
        """Pulls with a ticket that is wrong, past the core; it must not be done."""
        assert self.session is not None  # noqa: S101 - only the attached pull
        self._strays += 1
        self._stray_pulls[self._strays] = request
        self.pulls[request] = pulling
        self._lend(pulling.blocks, lent=True)
        self.session.send(codec.encode(wire.Pull(self._strays, request, wrong, spans(pulling.blocks), timeout)))

    def give_up_strays(self) -> None:
        """Their daemon is gone, or their time long over: what the core does for its own pulls."""
        for request in [request for request, pulling in self.pulls.items() if pulling.stray]:
            self._blocks_are_free(request)
