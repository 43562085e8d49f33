"""Thousands of peers for one real daemon: played in memory, on a real clock, each as often heard as a real one.

What is real is the house with its actors and state; workers' sockets, peers and the transport are played here.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Any

from kvd.net.interface import OPEN, Intake, PeerAnswered, PeerAsked, PeerEvent, WorkerEvent
from kvd.protocol import codec
from kvd.protocol.peer import Claim, Fence, Grant, Held, Hello, Ping, Pong, PoolInfo, Renew, Welcome
from kvd.protocol.types import Message
from kvd.transport.interface import Deregistered, Described, Event, Landed, PeerAdded, ReadRequest, Region, Registered
from tests.support.nameless import Nameless

LATENCY = 0.0002
"""Seconds that a message takes one way."""
INCARNATION = 7
EPOCH = 1


class CrowdPort(Nameless):
    """`kvd.net.interface.PeerPort` whose peers, at `tcp://peer-<n>:1`, answer every ask; each has the pool `there`."""

    address = "tcp://self:1"

    def __init__(self, loop: asyncio.AbstractEventLoop, raw_spec: bytes, pool_bytes: int) -> None:
        self._loop = loop
        self._pools = (PoolInfo("there", EPOCH, (1 << 32).to_bytes(8, "little"), pool_bytes, raw_spec),)
        self._on_event: Callable[[PeerEvent], None]
        self._addresses: dict[int, str] = {}
        self._links = 0

    def start(self, on_event: Callable[[PeerEvent], None], _intake: Intake = OPEN) -> None:
        """Begins."""
        self._on_event = on_event

    def connect(self, address: str, party: str = "") -> int:
        """Opens a link."""
        self._links += 1
        self._addresses[self._links] = address
        return self._links

    def ask(self, link: int, frame: bytes) -> bool:
        """Answers as the peer there would, later."""
        reply = self._reply(self._addresses[link], codec.peer_requests.decode(frame))
        if reply is not None:
            self._loop.call_later(2 * LATENCY, self._on_event, PeerAnswered(link, codec.encode(reply)))
        return True

    def _reply(self, address: str, request: Message) -> Message | None:
        match request:
            case Hello():
                return Welcome(address, INCARNATION, f"{address}#1", b"", self._pools)
            case Ping():
                return Pong(request.number, INCARNATION)
            case Claim():
                return Grant(request.claim, 1, EPOCH, INCARNATION)
            case Fence():
                return Held(request.claim)
            case _:
                return None

    def arrive(self, sender: bytes, message: Message) -> None:
        """A peer that connected to the daemon asks."""
        self._on_event(PeerAsked(sender, codec.encode(message)))

    def answer(self, _sender: bytes, _frame: bytes) -> bool:
        """Peers that connected to the daemon take every answer."""
        return True

    def disconnect(self, link: int) -> None:
        """Closes a link."""
        del self._addresses[link]

    def close(self) -> None:
        """Nothing to do."""


class Consumers:
    """Peers that connected to the daemon: each pings once a heartbeat and renews its claims, at moments of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop, port: CrowdPort, heartbeat: float, ttl: float) -> None:
        self._loop, self._port = loop, port
        self._heartbeat, self._ttl = heartbeat, ttl
        self._dice = random.Random(0)  # noqa: S311 - moments, not secrets
        self._running = True

    def join(self, number: int, claims: tuple[int, ...]) -> None:
        """One more."""
        sender = f"consumer-{number}#1".encode()
        self._again(self._dice.random() * self._heartbeat, self._heartbeat, sender, Ping(1))
        if claims:
            renewed = self._ttl / 3
            self._again(self._dice.random() * renewed, renewed, sender, Renew(claims))

    def leave(self) -> None:
        """All go."""
        self._running = False

    def _again(self, delay: float, period: float, sender: bytes, message: Message) -> None:
        self._loop.call_later(delay, self._arrive, period, sender, message)

    def _arrive(self, period: float, sender: bytes, message: Message) -> None:
        if self._running:
            self._again(period, period, sender, message)
            self._port.arrive(sender, message)


class LoopbackWorkers:
    """`kvd.net.interface.WorkerPort` for workers in this process: `heard` gets what each session is told."""

    endpoint = "ipc://nowhere"

    def __init__(self) -> None:
        self.heard: dict[bytes | int, Callable[[bytes], None]] = {}
        self.on_event: Callable[[WorkerEvent], None]

    def start(self, on_event: Callable[[WorkerEvent], None], _intake: Intake = OPEN) -> None:
        """Begins."""
        self.on_event = on_event

    def send_session(self, connection: int, frame: bytes, _descriptors: tuple[int, ...] = ()) -> None:
        """Tells a session."""
        self.heard[connection](frame)

    def send(self, session: bytes, frame: bytes) -> bool:
        """Tells a worker."""
        self.heard[session](frame)
        return True

    def close_session(self, connection: int) -> None:
        """Nobody is hung up on here."""
        raise RuntimeError(f"the daemon hung up on session {connection}")

    def forget_process(self, _connection: int) -> None:
        """Nobody ends."""

    def discard(self, _descriptors: tuple[int, ...]) -> None:
        """Nobody sends any."""

    def close(self) -> None:
        """Nothing to do."""


class InstantTransport:
    """`kvd.transport.interface.Transport` whose reads have landed as soon as the loop turns."""

    agent, metadata = "self#1", b""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._on_event: Callable[[Event], None]

    def start(self, on_event: Callable[[Event], None]) -> None:
        """Begins."""
        self._on_event = on_event

    def _soon(self, event: Event) -> None:
        self._loop.call_soon(self._on_event, event)

    def register(self, pool: int, _region: Region) -> None:
        """Registered at once."""
        self._soon(Registered(pool, b""))

    def deregister(self, pool: int, *, returns: bool = False) -> None:
        """Deregistered at once."""
        self._soon(Deregistered(pool, b""))

    def describe(self, pools: tuple[int, ...]) -> None:
        """Described at once."""
        self._soon(Described(pools, b""))

    def add_peer(self, agent: str, metadata: bytes, _address: str = "") -> None:
        """Added at once."""
        self._soon(PeerAdded(agent, metadata))

    def remove_peer(self, agent: str) -> None:
        """Nothing to do."""

    def read(self, request: ReadRequest) -> None:
        """Landed at once."""
        self._soon(Landed(request.read, 0.0))

    def abort(self, read: int) -> None:
        """Nothing is open for long enough."""

    def expect_connection(self) -> None:
        """Nothing to do."""

    def expect_readers(self, expected: bool) -> None:
        """Nothing to do."""

    def ping(self, number: int) -> None:
        """Nobody asks."""
        raise NotImplementedError(number)

    def stop(self) -> None:
        """Nothing to do."""


class PlainMemory:
    """A pool that nothing is copied into: an address and a size."""

    backing, device, descriptor = "none", "", -1

    def __init__(self, base: int, size: int) -> None:
        self.base, self.size, self.length = base, size, size

    def move(self) -> None:
        """Nobody's rights are withdrawn here."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to do."""

    free = close


class PlainProvider:
    """`kvd.memory.interface.MemoryProvider` of `PlainMemory`."""

    device = ""

    def __init__(self) -> None:
        self._next = 1 << 32

    def footprint(self, size: int) -> int:
        """Bytes that a pool takes."""
        return size

    def allocate(self, _name: str, size: int) -> Any:
        """A new pool."""
        self._next += 1 << 32
        return PlainMemory(self._next, size)

    def adopt(self, descriptor: int, size: int) -> Any:
        """Nobody kept one."""
        raise NotImplementedError((descriptor, size))
