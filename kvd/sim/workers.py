"""Model workers: each attaches, offers and pulls through the real client's core, as a process that can die or stop."""

from collections.abc import Callable

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
from kvd.sim.ledger import SCRAP, Ledger, Offering, Pulling
from kvd.sim.loop import Handle, Process
from kvd.sim.memory import File
from kvd.sim.network import Session
from kvd.sim.promises import Promise
from kvd.sim.world import World

_STEP = 0.008
"""Seconds between two polls of an engine, at most."""


class Worker(Ledger):
    """One rank of an engine, through all its processes."""

    def __init__(self, world: World, daemon: Daemon, name: str, cache: Cache) -> None:
        super().__init__(world, daemon, name, cache)
        self.runs = 0
        self.process = Process(world.loop, name)
        self.process.kill()
        self.session: Session | None = None
        self._last_file: File | None = None
        self._unheard = 0
        """The daemon's run that was asked for the pool and has not answered: it may keep one that was never seen."""
        """The pool that this worker, or its predecessor, had last."""

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
        self.open_books()
        self.process = Process(self.world.loop, f"{self.name}#{self.runs}")
        self.core = Core(self.name)
        self.descriptor = -1
        self.calls: dict[int, tuple[Promise, str]] = {}
        """Requests made wrong on purpose: the promise that refuses them, and what each was."""
        self.detaching = False
        self._lent = False
        self._incarnation = 0
        self._poll: Handle | None = None
        self._strays = 1 << 40
        self._stray_pulls: dict[int, str] = {}
        """Pulls made past the core, by call."""
        self.world.note(self.name, "starts", self.runs)
        self._connect()

    def start_again(self) -> None:
        """As `start`, unless a process runs already: the end of the world's faults starts all that are down."""
        if not self.alive:
            self.start()

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
        if self._unheard == daemon.runs:
            self._last_file = None
        self._unheard = daemon.runs
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
            case wire.Refused(code):
                if self.detaching or code == ErrorCode.BAD_POOL:
                    # It leaves, and its pool goes when the last read into it has ended; or its pool has gone already.
                    self._on_detached()
                elif self.session is not None:
                    self.session.hang_up(lose=False)

    def _on_attached(self, attached: wire.Attached, descriptor: int) -> None:
        kernel, session = self.world.kernel, self.session
        assert session is not None  # noqa: S101 - it came over it
        file = kernel.file(descriptor)
        self._unheard = 0
        if self.file is not None and self.file is not file:
            self.world.violate(Promise.SURVIVES, f"{self.name} gets another pool than it had")
        if attached.kept and self._last_file is not None and self._last_file is not file:
            self.world.violate(Promise.SURVIVES, f"{self.name}: the pool that was kept for it is another one")
        if self.file is None:
            # A successor, or the first: it may do what it likes, so nothing may write there any more.
            file.writable[:] = False
            file.data[:] = SCRAP
        if self.descriptor >= 0:
            kernel.close(self.descriptor)
        self.descriptor, self.file, self._last_file = descriptor, file, file
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
        self.world.loop.call_later(0.01, self.start_again)

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
            for frame in self.core.take_frames(now):
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
            self.check_batch(self.core.attached.incarnation, reply)
        elif isinstance(reply, wire.Error):
            self.calls.pop(reply.call, None)
            self.blocks_are_free(self._stray_pulls.pop(reply.call, ""))
        self.core.on_frame(frame, self.world.loop.now)
        self._poll_soon()

    # --- what the core says -----------------------------------------------------------------------------------------

    def _handle(self, event: events.Event) -> None:
        match event:
            case events.Offered(offer, ticket):
                offering = self.offers.get(offer)
                if offering is not None:
                    offering.stands, offering.ticket = True, ticket
                    if offering.answered is not None:
                        offering.answered(ticket)
            case events.OfferRefused(offer) | events.Released(offer):
                self.offer_ended(offer)
            case events.Done(request):
                self.pull_done(request)
            case events.Failed() | events.Cancelled():
                self.pull_failed(event)
            case events.Freed(request):
                self.blocks_are_free(request)

    # --- requests ---------------------------------------------------------------------------------------------------

    def offer(
        self,
        name: str,
        tokens: int,
        blocks: tuple[Blocks, ...],
        ttl: float,
        answered: Callable[[str], None] | None,
        *,
        secret: bytes,
        text: str,
    ) -> bool:
        """Fills the blocks with the content called `text` and offers them as `name`."""
        assert self.file is not None and self.session is not None  # noqa: S101, PT018
        for part in blocks:
            size = self.cache.spec.groups[part.group].block_tokens
            rows = np.zeros((len(part.ids) * size, content(text, part.group, tokens).shape[1]), np.uint8)
            rows[:tokens] = content(text, part.group, tokens)
            self.cache.fill(self.file.data, part.group, list(part.ids), rows)
        try:
            frame = self.core.offer(name, tokens, blocks, ttl, secret=secret)
        except KvdError:
            self.give_back(blocks)
            return False
        self.offers[name] = Offering(blocks, answered, secret)
        self.session.send(frame)
        return True

    def pull(self, request: str, ticket: str, pulling: Pulling, timeout: float) -> None:
        """Pulls into blocks that were taken for it."""
        assert self.session is not None  # noqa: S101 - only the attached pull
        now = self.world.loop.now
        frame = self.core.pull(request, ticket, pulling.blocks, timeout, now, consumer=pulling.sequence)
        self.pulls[request] = pulling
        self.lend(pulling.blocks, lent=True)
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
        self.lend(pulling.blocks, lent=True)
        self.session.send(codec.encode(wire.Pull(self._strays, request, wrong, spans(pulling.blocks), timeout)))
