"""One daemon's real actors on a virtual clock, with everybody it talks to played by the test."""

from typing import Any

from kvd.actors.gateway.admission import Rule
from kvd.bench.spec import flat_spec
from kvd.net.interface import SessionClosed, SessionFrame, SessionOpened, WorkerFrame
from kvd.protocol import codec
from kvd.protocol.types import Message
from kvd.protocol.worker import Attach, Attached
from tests.simulator.virtual.fabric import SimFabric
from tests.simulator.virtual.fleet import Daemon
from tests.simulator.virtual.network import UID, Network
from tests.simulator.virtual.world import World

SPEC = flat_spec(16, 16).encode()


class Lone:
    """`told` has what the daemon sent to each worker, session and peer, by whom it sent it to."""

    def __init__(self, rules: tuple[Rule, ...] = ()) -> None:
        self.world = World(1)
        self.world.note = lambda *what: None
        network, fabric = Network(self.world), SimFabric(self.world)
        self.daemon = Daemon(self.world, network, fabric, "d0", rules)
        self.daemon.start()
        self.told: dict[Any, list[Message]] = {}
        port, peers = self.daemon.worker_port, self.daemon.peer_port
        port.send_session = lambda number, frame, fds=(): self._hear(number, codec.session_replies.decode(frame))
        port.send = lambda session, frame: self._hear(session, codec.worker_replies.decode(frame))
        peers.answer = lambda sender, frame: self._hear(sender, codec.peer_replies.decode(frame))
        self._numbers = 0

    def _hear(self, whom: Any, message: Message) -> bool:
        self.told.setdefault(whom, []).append(message)
        return True

    def run(self, seconds: float = 0.05) -> None:
        self.world.loop.callbacks = 0
        self.world.loop.run_until(self.world.loop.now + seconds)
        assert self.world.violations == []

    def heard(self, whom: Any) -> list[Message]:
        """What was told since the last call."""
        self.run()
        return self.told.pop(whom, [])

    def connect(self, uid: int = UID, gid: int = UID) -> int:
        self._numbers += 1
        self.daemon.worker_port.on_event(SessionOpened(self._numbers, 1, uid, gid))
        return self._numbers

    def session_frame(self, number: int, frame: bytes) -> None:
        self.daemon.worker_port.on_event(SessionFrame(number, frame, ()))

    def hang_up(self, number: int) -> None:
        self.daemon.worker_port.on_event(SessionClosed(number))

    def attach(self, number: int, name: str, instance: bytes = bytes(16)) -> Message:
        """The answer to an attach."""
        self.session_frame(number, codec.encode(Attach(name, instance, SPEC)))
        (answer,) = self.heard(number)
        return answer

    def worker(self, name: str, uid: int = UID) -> bytes:
        """The session id of a worker that has attached."""
        attached = self.attach(self.connect(uid), name)
        assert isinstance(attached, Attached), attached
        return attached.session

    def say(self, session: bytes, frame: bytes, uid: int = UID) -> None:
        self.daemon.worker_port.on_event(WorkerFrame(session, frame, uid))

    def ask(self, sender: bytes, frame: bytes) -> None:
        self.daemon.peer_port.inject_ask(sender, frame)
