"""Hostile peers and workers: they send well-formed messages with wrong contents, replays and garbage.

Messages are drawn from their types, so that what the protocol gains is sent wrong from its first day on. Values are
those that others used under the same name, or edges, or nonsense; what proves a right is never one of others'.
"""

import types
import typing
from collections import deque
from collections.abc import Callable

import msgspec

from kvd.errors import KvdError
from kvd.protocol import codec, peer, worker
from kvd.protocol.types import Message
from tests.simulator.virtual.fleet import Daemon
from tests.simulator.virtual.loop import Process
from tests.simulator.virtual.network import Network, SimPeerPort
from tests.simulator.virtual.world import World

_SECRETS = frozenset({"secret", "proof", "digest", "generation", "stamp"})
"""Fields whose values a stranger cannot know."""
_SEEN = 64
"""How many values of one field are remembered."""
_INTS = (0, 1, 2, 1 << 32, (1 << 63) - 1)
_PEER_ASKS = typing.get_args(peer.PeerRequest)
_WORKER_ASKS = typing.get_args(worker.Request)


class Draws:
    """Draws messages, with field values learned from messages it has seen."""

    def __init__(self, world: World) -> None:
        self._rng = world.rng
        self._seen: dict[str, deque[object]] = {}

    def learn(self, thing: object) -> None:
        """Remembers what a message says."""
        for name in getattr(thing, "__struct_fields__", ()):
            value = getattr(thing, name)
            if isinstance(value, msgspec.Struct):
                self.learn(value)
            elif name not in _SECRETS:
                self._seen.setdefault(name, deque(maxlen=_SEEN)).append(value)

    def message(self, kind: type[Message]) -> Message:
        """A message of one type, perhaps with values that the type forbids."""
        hints = typing.get_type_hints(kind)
        return kind(**{name: self._value(name, hints[name]) for name in kind.__struct_fields__})

    def _value(self, name: str, hint: object) -> object:
        rng, seen = self._rng, self._seen.get(name)
        if seen and rng.random() < 0.7:
            return rng.choice(seen)
        origin, inner = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            return self._value(name, rng.choice(inner))
        if origin is tuple:
            return tuple(self._value("", inner[0]) for _ in range(rng.randrange(3)))
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            return self.message(typing.cast("type[Message]", hint))
        plain: dict[object, Callable[[], object]] = {
            int: lambda: rng.choice((*_INTS, rng.randrange(64))),
            float: lambda: rng.choice((-1.0, 0.0, 0.3, 1e9)),
            bool: lambda: rng.random() < 0.5,
            bytes: lambda: rng.randbytes(rng.choice((0, 4, 8, 16))),
            str: lambda: rng.choice(("", "e0.0", "s1", "sim://d0", "\N{SNOWMAN}" * 40)),
        }
        return plain[hint]() if hint in plain else None


class Hostile:
    """An admitted peer of all daemons, and a process of a worker's user beside it."""

    def __init__(self, world: World, network: Network, daemons: list[Daemon]) -> None:
        self.world = world
        self._daemons = daemons
        self._draws = Draws(world)
        self._frames: deque[bytes] = deque(maxlen=_SEEN)
        self._port = SimPeerPort(network, Process(world.loop, "hostile"), "hostile", b"hostile#1")
        self._port.start(lambda _event: None)
        network.overheard = self._overhear

    def _overhear(self, frame: bytes) -> None:
        if len(self._frames) < _SEEN or self.world.rng.random() < 0.1:
            self._frames.append(frame)
            try:
                self._draws.learn(codec.peer_requests.decode(frame))
            except KvdError:
                return  # somebody else's garbage

    def do(self) -> None:
        """Some messages to one daemon."""
        rng = self.world.rng
        daemon = rng.choice(self._daemons)
        if not daemon.alive:
            return
        link = self._port.connect(daemon.peer_port.address)
        for _ in range(rng.randint(1, 6)):
            if self._frames and rng.random() < 0.2:
                self._port.ask(link, self._blind(rng.choice(self._frames)))
            else:
                self._port.ask(link, codec.encode(self._draws.message(rng.choice(_PEER_ASKS))))
        frame = codec.encode(self._draws.message(rng.choice(_WORKER_ASKS)))
        sessions = sorted(daemon.worker_port.routes)
        if sessions and rng.random() < 0.5:
            daemon.worker_port.inject(rng.choice(sessions), frame, uid=2000)
        else:
            daemon.worker_port.inject(rng.randbytes(16), frame)

    def _blind(self, frame: bytes) -> bytes:
        """Another sender's message, without what proves its rights."""
        try:
            message = codec.peer_requests.decode(frame)
        except KvdError:
            return frame
        return codec.encode(self._draws.message(type(message)))
