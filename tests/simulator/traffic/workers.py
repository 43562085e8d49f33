"""Model workers: each attaches, offers and pulls through the real client's core, as a process that can die or stop."""

from collections.abc import Callable
from functools import partial

import numpy as np

from kvd.client import events
from kvd.client.connection import Phase
from kvd.client.driver import Dependencies, Driver
from kvd.client.events import Blocks, spans
from kvd.errors import ErrorCode, KvdError
from kvd.protocol import codec
from kvd.protocol import worker as wire
from kvd.protocol.types import Message
from tests.simulator.checks.ledger import SCRAP, Ledger, Offering, Pulling
from tests.simulator.checks.promises import Promise
from tests.simulator.traffic.pieces import Piece
from tests.simulator.virtual.cache import Cache, content
from tests.simulator.virtual.fleet import Daemon
from tests.simulator.virtual.line import SimConnection, SimPool
from tests.simulator.virtual.loop import Handle, Process
from tests.simulator.virtual.memory import File
from tests.simulator.virtual.network import Session
from tests.simulator.virtual.world import World

_STEP = 0.008
"""Seconds between two polls of an engine at most."""

_LATE = 0.05
"""Seconds after a standstill within which a worker is served that asked during it."""
_HOLD = 8.0
"""Seconds of a hold at most: longer than any pull."""


class Worker(Ledger):
    """One rank of an engine, over all its processes."""

    def __init__(self, world: World, daemon: Daemon, name: str, cache: Cache) -> None:
        super().__init__(world, daemon, name, cache)
        self.runs = 0
        self.gone = False
        """It never comes back."""
        self.lingering: list[Process] = []
        """Earlier processes that live on without a session."""
        self.process = Process(world.loop, name)
        self.process.kill()
        self._poll_due = 0.0
        self._last_file: File | None = None
        """The pool that this worker, or its predecessor, had last."""
        self._kept_by = 0
        """The daemon's run that lent it; 0 if it was given back."""
        self._died = 0.0
        """When the last process that had it ended."""
        self._unheard = 0
        """The daemon's run that has not answered an attach: it may keep a pool that the worker never saw."""

    @property
    def alive(self) -> bool:
        return not self.process.dead

    @property
    def attached(self) -> bool:
        """Whether it can send requests."""
        return self.alive and not self.process.paused and self.driver.connected and not self.detaching

    @property
    def session(self) -> Session | None:
        return self.connection.session if self.runs else None

    def start(self) -> None:
        """A new process, which knows nothing of the one before."""
        self.runs += 1
        self.open_books()
        self.process = process = Process(self.world.loop, f"{self.name}#{self.runs}")
        process.visible = Piece.INVISIBLE_PROCESSES not in self.world.pieces or self.world.chance(0.5)
        self.connection = SimConnection(self.world.kernel, self.daemon, process, self._heard)
        instance = process.name.encode().ljust(16, b".")
        dependencies = Dependencies(self.connection, self.connection, self._map, instance)
        self.driver = Driver("", self.name, self.cache.raw, self.cache.spec.pool_bytes, dependencies)
        self.core = self.driver.core
        self.calls: dict[int, tuple[Promise, str]] = {}
        """Requests made wrong on purpose: the promise they test, and what each was."""
        self.detaching = self._was_lent = False
        self._incarnation = 0
        self._poll: Handle | None = None
        self._strays = 1 << 40
        self._stray_pulls: dict[int, str] = {}
        """Pulls sent without the core, by call."""
        self._holds: dict[str, str] = {}
        """What holds the offer of a pull until it ends, by the pull."""
        self.world.note(self.name, "starts", self.runs)
        self._poll_at(0.0)

    def start_again(self) -> None:
        """Like `start`, unless a process is running."""
        if not self.alive and not self.gone:
            self.start()

    def crash(self) -> None:
        if self.process.dead:
            return
        self.world.note(self.name, "crashes")
        self.world.disturb(self.name)
        self.trouble += 1
        self._note_death(was_lent=self._was_lent)
        self.process.kill()
        if self.session is not None:
            self.session.hang_up(lose=False)
        self.world.kernel.close_all(self.process.name)

    def linger(self, seconds: float) -> None:
        """Its process loses its session for good and writes to the blocks that are its own, until it dies.

        Another process follows at once.
        """
        self.world.note(self.name, "lingers")
        self.world.disturb(self.name)
        self.trouble += 1
        rest = Process(self.world.loop, self.process.name)
        self.process.outlive(rest)  # all it did through its daemon; `rest` is what it does without it
        rest.on_death.append(partial(self._bury, rest, self._was_lent))
        self.lingering.append(rest)
        if self.session is not None:
            self.session.hang_up(lose=False)
        if self.file is not None:
            own = tuple(Blocks(group, 0, list(ids)) for group, ids in enumerate(self.free) if ids)
            self._write_on(rest, self.file, own)
        rest.call_later(seconds, rest.kill)

    def _write_on(self, process: Process, file: File, own: tuple[Blocks, ...]) -> None:
        file.data[self.cache.bytes_of(own)] = SCRAP
        process.call_later(_STEP, self._write_on, process, file, own)

    def _bury(self, process: Process, was_lent: bool) -> None:
        self.lingering.remove(process)
        self._note_death(was_lent=was_lent)
        self.world.disturb(self.name)
        self.world.kernel.close_all(process.name)

    def _note_death(self, *, was_lent: bool) -> None:
        """A pool is kept from the death of the last process that had it, not of one that only asked for it."""
        if was_lent:
            self._died = self.world.loop.now

    def pause(self) -> None:
        self.trouble += 1
        self.process.pause()

    def resume(self) -> None:
        self.trouble += 1
        self.process.resume()

    # --- the session ------------------------------------------------------------------------------------------------

    def _map(self, descriptor: int, _attached: wire.Attached) -> SimPool:
        """Takes the pool when it is first lent to this process."""
        pool = SimPool(self.world.kernel, descriptor)
        # A successor, or the first: it may do what it likes, so nothing may write there any more.
        self.file = pool.file
        pool.file.writable[:] = False
        pool.file.data[:] = SCRAP
        return pool

    def _attached(self) -> None:
        """Handles a pool that the daemon lent, perhaps again."""
        attached = self.core.attached
        if attached.kept and self._last_file is not None and self._last_file is not self.file:
            self.world.violate(Promise.SURVIVES, f"{self.name}: the pool that was kept for it is another one")
        if not attached.kept and self._is_owed():
            self.world.violate(Promise.SURVIVES, f"{self.name}: its daemon has not kept its pool")
        self._last_file, self._kept_by, self._unheard = self.file, self.daemon.runs, 0
        self._was_lent = True
        if self._incarnation != attached.incarnation:
            self._incarnation = attached.incarnation
            self.give_up_strays()

    def _is_owed(self) -> bool:
        """Whether the daemon must have kept the pool for this process, which follows one that died lately."""
        if not self._kept_by or self.world.pools_end:
            return False
        until = self.daemon.keeps_until(self._kept_by, self._died)
        late = [end + _LATE for began, end in self.world.standstills if began <= until <= end]
        return self.world.loop.now < max([until, *late])

    def uses(self, file: File) -> bool:
        """Whether it has that pool from a run of its daemon that is up."""
        session = self.session if self.alive and self.driver.connected and not self.detaching else None
        current = session is not None and session.open and session.port is self.daemon.worker_port
        return current and self.file is file

    def detach(self) -> None:
        """Gives the pool back, then starts over as another process."""
        self.world.note(self.name, "detaches")
        self.world.disturb(self.name)
        self.trouble += 1
        self.detaching, self._kept_by = True, 0
        self.driver.detach()

    def _over(self) -> None:
        """Ends its process; another one follows."""
        self.crash()
        self.world.loop.call_later(0.01, self.start_again)

    # --- polling ----------------------------------------------------------------------------------------------------

    def _heard(self, frame: bytes) -> None:
        """Handles what has arrived, perhaps the end of the session."""
        if frame:
            self._check_reply(codec.worker_replies.decode(frame))
        elif self.session is not None and not self.session.open:
            self.trouble += 1
        self._poll_soon()

    def _poll_soon(self) -> None:
        self._poll_at(self.world.loop.now + self.world.rng.random() * _STEP)

    def _poll_at(self, when: float) -> None:
        if self._poll is not None and self._poll_due <= when:
            return
        if self._poll is not None:
            self._poll.cancel()
        self._poll_due = when
        self._poll = self.process.call_later(max(0.0, when - self.world.loop.now), self.poll)

    def poll(self) -> None:
        """One step of the engine: handles events, sends what the core wants to send."""
        self._poll = None
        now, was = self.world.loop.now, self.connection.phase
        self._before_opening()
        self.driver.step(now)
        if was is Phase.ATTACHED and self.connection.phase is not was:
            self.trouble += 1  # it hung up itself
        if self.connection.phase is not was and self.connection.phase is Phase.ATTACHED:
            self._attached()
        for event in self.core.take_events():
            self._handle(event)
        if self.driver.failed is not None:
            self._given_up(self.driver.failed)
        elif self.driver.detached or (self.detaching and not self.driver.connected):
            self._over()  # its pool goes when the last read into it has ended
        elif self.connection.poll(0):
            self._poll_soon()
        elif (due := self.driver.next_timer()) < float("inf"):
            self._poll_at(max(due, now) + self.world.rng.random() * _STEP)

    def _before_opening(self) -> None:
        """A daemon that was asked for the pool may keep one that the worker never saw."""
        if self.connection.phase is Phase.DOWN and self.connection.listened_to:
            if self._unheard == self.daemon.runs or (self._unheard and self.daemon.systemd is not None):
                self._last_file = None
            self._unheard = self.daemon.runs

    def _given_up(self, error: KvdError) -> None:
        if error.code is ErrorCode.BAD_POOL:
            self.world.violate(Promise.SURVIVES, f"{self.name}: {error.text}")
        self._over()

    def _check_reply(self, reply: wire.Reply) -> None:
        if isinstance(reply, wire.Notifications):
            self.check_batch((self.core.attached.incarnation, self.core.attached.tenancy), reply)
        elif isinstance(reply, wire.Error):
            self.calls.pop(reply.call, None)
            self.blocks_are_free(self._stray_pulls.pop(reply.call, ""))

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
            case events.NotExtended():
                self.world.violate(Promise.SURVIVES, f"{self.name}: {event}")
            case events.Done(request):
                self.pull_done(request, given_back=self.detaching)
                self.cancel(self._holds.pop(request, ""))
            case events.Failed(request) | events.Cancelled(request):
                self.pull_failed(event)
                self.cancel(self._holds.pop(request, ""))
            case events.Freed(request):
                self.blocks_are_free(request)
            case _:
                pass

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
        assert self.file is not None and self.session is not None  # noqa: PT018
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

    def open_offer(
        self,
        name: str,
        blocks: tuple[Blocks, ...],
        ttl: float,
        answered: Callable[[str], None] | None,
        *,
        secret: bytes,
    ) -> bool:
        """Opens an offer that grows, which is to have `blocks` in the end."""
        assert self.session is not None
        try:
            frame = self.core.offer(name, 0, (), ttl, secret=secret, grows=True)
        except KvdError:
            self.give_back(blocks)
            return False
        self.offers[name] = Offering(blocks, answered, secret)
        self.session.send(frame)
        return True

    def extend_offer(self, name: str, tokens: int, blocks: tuple[Blocks, ...], *, closes: bool) -> None:
        assert self.session is not None
        self.session.send(self.core.extend(name, tokens, blocks, closes=closes))

    def pull(self, request: str, ticket: str, pulling: Pulling, timeout: float) -> None:
        assert self.session is not None
        now = self.world.loop.now
        frame = self.core.pull(request, ticket, pulling.blocks, timeout, now, consumer=pulling.sequence)
        self.pulls[request] = pulling
        self.lend(pulling.blocks, lent=True)
        self.session.send(frame)
        self._poll_soon()

    def hold(self, request: str, ticket: str, sequence: str) -> None:
        """Holds the offer for the pull `request` to come, until that ends."""
        assert self.session is not None
        self._holds[request] = hold = f"{request}/hold"
        frame = self.core.pull(hold, ticket, (), _HOLD, self.world.loop.now, consumer=sequence, hold=True)
        self.session.send(frame)

    def cancel(self, request: str) -> None:
        """Cancels a pull or withdraws an offer."""
        if request in self.pulls:
            self.pulls[request].spoilt = True
        try:
            frame = self.core.cancel(request)
        except KvdError:
            return
        assert self.session is not None
        self.session.send(frame)

    def send_wrong(self, make: Callable[[int], Message], promise: Promise, what: str) -> None:
        """Sends a request that must be refused; `make` builds it from its call number."""
        assert self.session is not None
        self.session.send(self.make_wrong(make, promise, what))

    def make_wrong(self, make: Callable[[int], Message], promise: Promise, what: str) -> bytes:
        """The frame of a request that must be refused."""
        self._strays += 1
        self.calls[self._strays] = (promise, what)
        return codec.encode(make(self._strays))

    def pull_wrongly(self, request: str, wrong: str, pulling: Pulling, timeout: float) -> None:
        """Pulls with a wrong ticket, without the core; it must not end as done."""
        assert self.session is not None
        self._strays += 1
        self._stray_pulls[self._strays] = request
        self.pulls[request] = pulling
        self.lend(pulling.blocks, lent=True)
        self.session.send(codec.encode(wire.Pull(self._strays, request, wrong, spans(pulling.blocks), timeout)))
