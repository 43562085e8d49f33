"""Runs the real actors in this process, on a real clock, among simulated peers (`tests.simulator.simulated_peers`)."""

import asyncio
import gc
import itertools
import resource
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import uvloop
from prometheus_client import CollectorRegistry

from kvd import limits
from kvd.actors.build import Dependencies, build_actors
from kvd.actors.gateway.admission import Policy
from kvd.actors.runtime.actor import Actor, call
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.settings import Settings
from kvd.bench.spec import flat_spec, tokens_of
from kvd.memory.stamps import HostStamps
from kvd.metrics import Metrics
from kvd.net.interface import SessionFrame, SessionOpened, WorkerFrame
from kvd.protocol import codec, ticket
from kvd.protocol.peer import Claim
from kvd.protocol.ticket import Ticket, TicketRank
from kvd.protocol.types import Message, Span
from kvd.protocol.worker import (
    Acknowledge,
    Attach,
    Attached,
    Notifications,
    Offer,
    Offered,
    Pull,
    Status,
    StatusRequest,
)
from tests.simulator.simulated_peers import (
    EPOCH,
    INCARNATION,
    Consumers,
    CrowdPort,
    InstantTransport,
    LoopbackWorkers,
    PlainProvider,
)
from tests.support.statuses import process_status

_SPEC = flat_spec(64, 16 * limits.KIB)
_RAW_SPEC = _SPEC.encode()
_UID = 0
_BLOCK = (Span(0, 0, bytes(4)),)
_TTL = 3600.0
_SECRET = bytes(16)
_OFFERS_PER_WORKER = 4000
_START_SECONDS = 60.0
_PAUSE = 0.003
"""Seconds between two requests, so that what happens once per heartbeat falls between some of them."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of a daemon with that many peers and leases; times in seconds, memory in bytes."""

    peers: int
    leases: int
    met_seconds: float
    """Until every peer was ready."""
    longest_stall: float
    """The longest time the event loop was blocked meanwhile."""
    status: tuple[float, float]
    """Median and 99th percentile of a status; `pull` the same of a pull of one block."""
    status_bytes: int
    pull: tuple[float, float]
    first_pull: tuple[float, float]
    """The same for the first pull from each peer, which computes the route."""
    busy: float
    """Processor seconds per second when idle: heartbeats and renewals."""
    memory: int
    """Taken by the process, for daemon and peers together."""


class _Worker:
    """A worker in this process."""

    def __init__(self, port: LoopbackWorkers, number: int) -> None:
        self._port, self._number = port, number
        self._arrived: asyncio.Future[Message] | None = None
        self._wanted: type[Message] = Message
        self._session = b""

    async def attach(self) -> None:
        self._port.heard[self._number] = lambda frame: self._take(codec.session_replies.decode(frame))
        self._port.on_event(SessionOpened(self._number, 1, _UID, _UID))
        frame = codec.encode(Attach(f"w{self._number}", bytes(16), _RAW_SPEC))
        attached = await self._reply(Attached, lambda: self._port.on_event(SessionFrame(self._number, frame, ())))
        assert isinstance(attached, Attached)  # noqa: S101 - what was waited for
        self._session = attached.session
        self._port.heard[self._session] = lambda frame: self._take(codec.worker_replies.decode(frame))

    async def ask(self, message: Message, wanted: type[Message]) -> Message:
        """Sends the message; returns the next reply of type `wanted`."""
        frame = WorkerFrame(self._session, codec.encode(message), _UID)
        return await self._reply(wanted, lambda: self._port.on_event(frame))

    async def _reply(self, wanted: type[Message], send: Callable[[], None]) -> Message:
        self._wanted, self._arrived = wanted, asyncio.get_running_loop().create_future()
        send()
        return await asyncio.wait_for(self._arrived, _START_SECONDS)

    def _take(self, message: Message) -> None:
        if isinstance(message, Notifications):
            last = message.first + len(message.items) - 1
            acknowledged = codec.encode(Acknowledge(last))
            self._port.on_event(WorkerFrame(self._session, acknowledged, _UID))
        if self._arrived is None or self._arrived.done():
            return
        if isinstance(message, self._wanted):
            self._arrived.set_result(message)
        elif not isinstance(message, Notifications):
            self._arrived.set_exception(RuntimeError(f"the daemon said {message}"))


class _Supervisor:
    def failed(self, actor: Actor, message: object, error: Exception) -> None:
        raise RuntimeError(f"{actor.name} cannot handle {message!r}") from error


class _Daemon:
    """The actors, their simulated peers, and workers."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        settings = Settings(daemon="self", incarnation=1 << 40)
        self.port = CrowdPort(loop, _RAW_SPEC, _SPEC.pool_bytes)
        self.consumers = Consumers(loop, self.port, settings.heartbeat, settings.claim_ttl)
        self.claim_ttl = settings.claim_ttl
        self.workers = LoopbackWorkers()
        self.metrics = Metrics(CollectorRegistry())
        self.context = ActorContext(
            loop=loop,
            settings=settings,
            metrics=self.metrics,
            supervisor=_Supervisor(),
            condition=lambda _name, _reason: None,
            idle=lambda _actor: None,
        )
        session = iter(range(1, limits.MAX_WORKERS))
        dependencies = Dependencies(
            worker_port=self.workers,
            peer_port=self.port,
            transport=InstantTransport(loop),
            provider=PlainProvider(),
            background=lambda work, done: done(work()),
            pool_background=lambda work, done: done(work()),
            draw_session=lambda: next(session).to_bytes(16, "little"),
            describe=lambda: process_status("self"),
            transport_died=lambda _reason: None,
            policy=Policy(_UID),
            stamps=HostStamps(),
        )
        self.actors = build_actors(self.context, dependencies)

    async def worker(self, number: int) -> _Worker:
        worker = _Worker(self.workers, number)
        await worker.attach()
        return worker

    async def meet(self, peers: int) -> tuple[float, float]:
        """Connects to all peers; returns the seconds until they were ready, and the loop's longest stall meanwhile."""
        started = last = time.perf_counter()
        longest = 0.0
        call(self.actors.handshake.connector.expect, frozenset(_address(number) for number in range(peers)))
        while self.metrics.peers.labels("ready")._value.get() < peers:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last - 0.001), now
        return last - started, longest

    async def fill(self, peers: int, leases: int) -> None:
        """Makes `leases` offers and has the peers claim them, evenly; the peers renew them."""
        held: list[int] = []
        for index in range(leases):
            if index % _OFFERS_PER_WORKER == 0:
                worker = await self.worker(10 + index // _OFFERS_PER_WORKER)
            name = f"lease-{index}"
            offered = await worker.ask(Offer(1, name, tokens_of(1), _BLOCK, _TTL, _SECRET), Offered)
            assert isinstance(offered, Offered)  # noqa: S101 - what was waited for
            peer, text = index * peers // leases, ticket.decode(offered.ticket)
            (rank,) = text.ranks
            named = (rank.pool, name, rank.incarnation, rank.generation, text.proof(rank), "consumer")
            claim = Claim(index, *named, reader=0, readers=1, ttl=self.claim_ttl)
            self.port.arrive(f"consumer-{peer}#1".encode(), claim)
            held.append(index)
            if (index + 1) * peers // leases > peer:
                self.consumers.join(peer, tuple(held))
                held.clear()


def _address(number: int) -> str:
    return f"tcp://peer-{number}:1"


def _ticket(peer: int, number: int) -> str:
    rank = TicketRank(_address(peer), _address(peer), INCARNATION, "there", f"offer-{number}", 0, _SECRET, 1, EPOCH)
    return Ticket(tokens_of(1), (rank,), (_BLOCK,)).encode()


def run(peers: int, leases: int, rounds: int) -> Measured:
    """Fills a daemon, then takes turns `rounds` times between a status and a pull."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(peers, leases, rounds))


async def _measure(peers: int, leases: int, rounds: int) -> Measured:
    before = _resident()
    daemon = _Daemon(asyncio.get_running_loop())
    asker = await daemon.worker(1)
    met, stall = await daemon.meet(peers)
    await daemon.fill(peers, leases)
    busy = await _busy(2.0)
    memory = _resident() - before
    gc.collect()
    gc.freeze()
    names = itertools.count()

    async def pull(peer: int) -> float:
        number = next(names)
        request = Pull(number, f"pull-{number}", _ticket(peer, number), _BLOCK, 30.0)
        return (await _timed(asker.ask(request, Notifications)))[0]

    first = [await pull(peer) for peer in range(peers)]
    status_bytes = 0
    statuses, pulls = [], []
    for number in range(rounds):
        pulls.append(await pull(number % peers))
        seconds, status = await _timed(asker.ask(StatusRequest(number), Status))
        statuses.append(seconds)
        status_bytes = len(getattr(status, "report", b""))
        await asyncio.sleep(_PAUSE)
    daemon.consumers.leave()
    gc.unfreeze()
    return Measured(
        peers=peers,
        leases=leases,
        met_seconds=met,
        longest_stall=stall,
        status=_tail(statuses),
        status_bytes=status_bytes,
        pull=_tail(pulls),
        first_pull=_tail(first),
        busy=busy,
        memory=memory,
    )


async def _timed(asked: Awaitable[Message]) -> tuple[float, Message]:
    started = time.perf_counter()
    answer = await asked
    return time.perf_counter() - started, answer


async def _busy(seconds: float) -> float:
    started = time.process_time()
    await asyncio.sleep(seconds)
    return (time.process_time() - started) / seconds


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _tail(times: list[float]) -> tuple[float, float]:
    return float(np.median(times)), float(np.quantile(times, 0.99))
