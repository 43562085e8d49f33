"""The sockets of the simulated world.

Between daemons messages get lost, come twice, late and in another order, and partitions cut pairs of daemons off from
each other, both ways or one. Between a worker and its daemon they are reliable and in order, until the session is lost.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from kvd.errors import BadRequest, ErrorCode
from kvd.net.interface import (
    OPEN,
    Intake,
    PeerAnswered,
    PeerAsked,
    PeerEvent,
    ProcessEnded,
    SessionClosed,
    SessionFrame,
    SessionOpened,
    WorkerEvent,
    WorkerFrame,
)
from tests.simulator.virtual.loop import Process
from tests.simulator.virtual.world import LONG_DELAY, World
from tests.support.nameless import Nameless

_PREFIX = "sim://"
_ROOT = "."
UID = 1000
"""The user that every worker runs as."""
_LOCAL = 0.0002
"""Seconds that a local message takes; the same for all, so that they stay in order."""


def alias(address: str) -> str:
    """Another spelling of an address, as DNS allows for every name."""
    return address + _ROOT


def _daemon_at(address: str) -> str:
    return address.removeprefix(_PREFIX).removesuffix(_ROOT)


class Network:
    """Who listens where."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.peer_ports: dict[str, SimPeerPort] = {}
        self.worker_ports: dict[str, SimWorkerPort] = {}
        self.overheard: Callable[[bytes], None] = lambda _frame: None
        """Called with every request of a daemon to a peer."""
        self._last: dict[tuple[str, str], float] = {}
        """When the last message from one daemon to another arrives, if they stay in order."""

    def carry(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        """Takes one message from daemon to daemon, or loses it."""
        world, knobs = self.world, self.world.knobs
        if (source, target) in world.cut or world.chance(knobs.drop):
            world.disturb_message(source, target)
            return
        copies = 1
        if world.chance(knobs.duplicate):
            copies = 2
        for _ in range(copies):
            delay = 0.0003 + world.rng.random() * 0.0007
            if world.orderly:
                arrives = max(world.loop.now + delay, self._last.get((source, target), 0.0))
                self._last[source, target] = arrives
                delay = arrives - world.loop.now
            if world.chance(knobs.delay):
                delay += world.rng.random() * LONG_DELAY
                world.disturb_message(source, target)
            world.loop.call_later(delay, deliver)


class _Inbox:
    """Events that have arrived at a port and were not admitted yet."""

    def __init__(self) -> None:
        self._events: deque[Any] = deque()
        self.on_event: Callable[[Any], None] = lambda _event: None
        self.intake: Intake = OPEN

    def put(self, event: Any) -> None:
        self._events.append(event)
        self._hand_on()

    def _hand_on(self) -> None:
        while self._events and self.intake.admits(self._hand_on):
            self.on_event(self._events.popleft())


class SimPeerPort(Nameless):
    """One daemon's peer socket; implements `kvd.net.interface.PeerPort`."""

    def __init__(self, network: Network, process: Process, daemon: str, agent: bytes) -> None:
        self._network = network
        self._process = process
        self.daemon = daemon
        self.agent = agent
        self.links: dict[int, str] = {}
        self._askers: dict[bytes, tuple[SimPeerPort, int]] = {}
        """By routing id: each link has its own, `<daemon>#<incarnation>#<token>`."""
        self._last_link, self._inbox = 0, _Inbox()
        self.answers_to_stranger: list[bytes] = []
        """Answers to garbage."""

    @property
    def address(self) -> str:
        """Where peers reach us."""
        return _PREFIX + self.daemon

    def start(self, on_event: Callable[[PeerEvent], None], intake: Intake = OPEN) -> None:
        self._inbox.on_event, self._inbox.intake = on_event, intake
        self._network.peer_ports[self.daemon] = self

    def connect(self, address: str, party: str = "") -> int:
        if not address.startswith(_PREFIX):
            raise BadRequest(ErrorCode.BAD_TICKET, f"{address!r} is no address of a daemon")
        self._last_link += 1
        self.links[self._last_link] = address
        return self._last_link

    def ask(self, link: int, frame: bytes) -> bool:
        address = self.links[link]
        network = self._network
        network.world.note(self.daemon, "asks", address, frame)
        network.overheard(frame)

        def deliver() -> None:
            port = network.peer_ports.get(_daemon_at(address))
            if port is not None and (self.daemon, port.daemon) not in network.world.cut:
                port._asked(self, link, frame)

        network.carry(self.daemon, _daemon_at(address), deliver)
        return True

    def _asked(self, asker: "SimPeerPort", link: int, frame: bytes) -> None:
        routing = b"%s#%d" % (asker.agent, link)
        self._askers[routing] = (asker, link)
        self.inject_ask(routing, frame)

    def inject_ask(self, sender: bytes, frame: bytes) -> None:
        self._process.call_soon(self._inbox.put, PeerAsked(sender, frame))

    def inject_answer(self, link: int, frame: bytes) -> None:
        self._process.call_soon(self._inbox.put, PeerAnswered(link, frame))

    def answer(self, sender: bytes, frame: bytes) -> bool:
        """Sends to a daemon that connected to us."""
        asker, link = self._askers.get(sender, (None, 0))
        network = self._network
        network.world.note(self.daemon, "answers", sender, frame)
        if asker is None:
            self.answers_to_stranger.append(frame)
            return False
        source = self.daemon

        def deliver() -> None:
            if asker._process.dead or (source, asker.daemon) in network.world.cut:
                return
            if link in asker.links:
                asker.inject_answer(link, frame)

        network.carry(source, asker.daemon, deliver)
        return True

    def disconnect(self, link: int) -> None:
        del self.links[link]

    def close(self) -> None:
        if self._network.peer_ports.get(self.daemon) is self:
            del self._network.peer_ports[self.daemon]


class Receiver(Protocol):
    """A worker, as its sockets see it."""

    def on_session(self, frame: bytes, descriptors: tuple[int, ...]) -> None:
        """A frame on the session socket."""

    def on_frame(self, frame: bytes) -> None:
        """A frame on the request socket."""

    def on_closed(self) -> None:
        """End of file."""


def session_of(worker: str) -> str:
    """Where it counts as a fault that a session of this worker ends, whatever becomes of the worker."""
    return f"{worker.partition('#')[0]}'s session"


class Session:
    """One worker's connections with one run of a daemon: the session socket, and ZMQ beside it."""

    def __init__(self, port: "SimWorkerPort", number: int, process: Process, receiver: "Receiver") -> None:
        self.port = port
        self.number = number
        self.process = process
        self.receiver = receiver
        self.routing = b""
        self.open = True
        self.lost = False
        """Messages under way are lost too."""

    def connect_requests(self, routing: bytes) -> None:
        """Connects the ZMQ socket under the id that the daemon gave."""
        self.routing = routing
        self.port.routes[routing] = self

    def send_session(self, frame: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """A frame for the daemon; it gets its own duplicates of `descriptors`."""
        self.port.from_worker(self, SessionFrame(self.number, frame, self.port.duplicate(descriptors, to_daemon=True)))

    def send(self, frame: bytes) -> None:
        self.port.from_worker(self, WorkerFrame(self.routing, frame, UID))

    def hang_up(self, *, lose: bool) -> None:
        """Drops the connection and, with `lose`, what is under way in both directions."""
        if not self.open:
            return
        self.open, self.lost = False, lose
        self.port.disturb(session_of(self.process.name))
        self.port.routes.pop(self.routing, None)
        self.port.sessions.pop(self.number, None)
        self.port.later(self.port.process, self.port.on_event, SessionClosed(self.number))
        self.port.later(self.process, self.receiver.on_closed)


class SimWorkerPort:
    """One daemon's local sockets; implements `kvd.net.interface.WorkerPort`."""

    def __init__(self, network: Network, process: Process, daemon: str) -> None:
        self._network = network
        self.process = process
        self.daemon = daemon
        self.sessions: dict[int, Session] = {}
        self.listening = False
        self._forgotten: set[int] = set()
        self.routes: dict[bytes, Session] = {}
        self._last, self._inbox = 0, _Inbox()
        self.answers_to_stranger: list[bytes] = []

    def disturb(self, what: str) -> None:
        """Records a fault."""
        self._network.world.disturb(what)

    @property
    def endpoint(self) -> str:
        return f"ipc://{self.daemon}"

    def on_event(self, event: WorkerEvent) -> None:
        self._inbox.put(event)

    def start(self, on_event: Callable[[WorkerEvent], None], intake: Intake = OPEN) -> None:
        self._inbox.on_event, self._inbox.intake, self.listening = on_event, intake, True
        self._network.worker_ports[self.daemon] = self

    def later(self, process: Process, callback: Callable[..., None], *args: object) -> None:
        """Runs `callback` in `process` after the time that a local message takes."""
        self._network.world.loop.call_later(_LOCAL, process.call_soon, callback, *args)

    def duplicate(self, descriptors: tuple[int, ...], *, to_daemon: bool, worker: str = "") -> tuple[int, ...]:
        """The descriptors that the receiver gets."""
        kernel = self._network.world.kernel
        owner = self.process.name if to_daemon else worker
        return tuple(kernel.open(owner, kernel.file(descriptor)) for descriptor in descriptors)

    def accept(self, process: Process, receiver: "Receiver") -> Session:
        self._last += 1
        session = Session(self, self._last, process, receiver)
        self.sessions[session.number] = session
        pid = process.pid if process.visible else 0
        self.later(self.process, self.on_event, SessionOpened(session.number, pid, UID, UID, process.visible))
        if process.visible:
            process.on_death.append(lambda: self._tell_ended(session.number))
        return session

    def _tell_ended(self, number: int) -> None:
        if number not in self._forgotten:
            self.later(self.process, self.on_event, ProcessEnded(number))

    def forget_process(self, connection: int) -> None:
        self._forgotten.add(connection)

    def from_worker(self, session: Session, event: SessionFrame | WorkerFrame) -> None:
        """A frame under way to the daemon."""
        self._network.world.note(session.process.name, "sends", self.daemon, event.frame)

        def deliver() -> None:
            if not session.lost and not self.process.dead:
                self.process.call_soon(self.on_event, event)
            elif isinstance(event, SessionFrame) and not self.process.dead:
                self.discard(event.descriptors)

        self._network.world.loop.call_later(_LOCAL, deliver)

    def inject(self, session: bytes, frame: bytes, uid: int = UID) -> None:
        """Delivers a frame from an unknown sender on the request socket."""
        self.process.call_soon(self.on_event, WorkerFrame(session, frame, uid))

    def inject_session(self, frame: bytes) -> int:
        """Connects to the session socket and sends `frame`."""
        self._last += 1
        self.process.call_soon(self.on_event, SessionOpened(self._last, 1, UID, UID))
        self.process.call_soon(self.on_event, SessionFrame(self._last, frame, ()))
        self.process.call_soon(self.on_event, SessionClosed(self._last))
        return self._last

    def send_session(self, connection: int, frame: bytes, descriptors: tuple[int, ...] = ()) -> None:
        session = self.sessions.get(connection)
        self._network.world.note(self.daemon, "lends", connection, frame)
        if session is None:
            self.answers_to_stranger.append(frame)
            return
        copies = self.duplicate(descriptors, to_daemon=False, worker=session.process.name)

        def deliver() -> None:
            if not session.lost and not session.process.dead:
                session.process.call_soon(session.receiver.on_session, frame, copies)
            elif not session.process.dead:
                self.discard(copies)

        self._network.world.loop.call_later(_LOCAL, deliver)

    def close_session(self, connection: int) -> None:
        session = self.sessions.pop(connection, None)
        if session is not None and session.open:
            session.open = False
            self.disturb(session_of(session.process.name))
            self.routes.pop(session.routing, None)
            self.later(session.process, session.receiver.on_closed)

    def discard(self, descriptors: tuple[int, ...]) -> None:
        for descriptor in descriptors:
            self._network.world.kernel.close(descriptor)

    def send(self, session: bytes, frame: bytes) -> bool:
        """A frame for a worker's queue."""
        world = self._network.world
        world.note(self.daemon, "tells", session, frame)
        target = self.routes.get(session)
        if target is None:
            self.answers_to_stranger.append(frame)
            return False
        if world.chance(world.knobs.queue_full):
            return False

        def deliver() -> None:
            if not target.lost and not target.process.dead:
                target.process.call_soon(target.receiver.on_frame, frame)

        world.loop.call_later(_LOCAL, deliver)
        return True

    def close(self) -> None:
        self.listening = False
        for session in list(self.sessions.values()):
            session.hang_up(lose=True)
