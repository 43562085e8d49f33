"""What every actor of one daemon shares: the loop, the settings, and whom to tell. No state of any of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvd.actors.runtime.actor import Actor, Dispatcher, Supervisor
from kvd.actors.runtime.loop import Loop
from kvd.actors.runtime.settings import Settings
from kvd.actors.runtime.spans import Spans
from kvd.errors import KvdError
from kvd.metrics import Metrics
from kvd.protocol.types import Message
from kvd.protocol.worker import Notifications

SetCondition = Callable[[str, str | None], None]
SetNote = Callable[[str, str | None, float], None]


class PeerMessages(Protocol):
    """Sends to other daemons. Nothing waits: a message that cannot be sent is lost, as on the network."""

    def ask(self, address: str, request: Message) -> None:
        """Sends a request to the peer at `address`, which a pull has needed before."""

    def answer(self, sender: bytes, reply: Message) -> None:
        """Answers a request of the peer with the routing id `sender`."""


class WorkerReplies(Protocol):
    """Sends to attached workers by name; what is for a worker without a session is dropped."""

    def answer(self, worker: str, message: Message) -> None:
        """Answers a request. Hangs up on a worker whose queue is full: it would wait for the answer forever."""

    def refuse(self, worker: str, call: int, error: KvdError) -> None:
        """Refuses the request `call`, as `answer` does; nothing has changed."""

    def notify(self, worker: str, batch: Notifications) -> bool:
        """Sends notifications; False if the worker's queue is full: send them again later."""


@dataclass(slots=True, kw_only=True)
class ActorContext:
    """The actors by their names; `kvd.actors.build` fills them in once."""

    loop: Loop
    settings: Settings
    metrics: Metrics
    supervisor: Supervisor
    condition: SetCondition
    """Says why the daemon is not ready (or, with None, that this reason is gone)."""
    idle: Callable[[str], None]
    """Called with the name of an actor that was told to drain, once it has nothing left to do."""
    note: SetNote = lambda _name, _text, _seconds: None
    """Says what is wrong, and for how many seconds already, with one peer while the daemon serves others (or, with
    None, that it is well again)."""
    spans: Spans | None = None
    """Traces requests; None if tracing is off."""
    starved: Callable[[float], str] = lambda _seconds: ""
    """Says how long the daemon waited for a processor in the last so many seconds, if that was long; else empty."""
    dispatcher: Dispatcher = field(init=False)
    peers: PeerMessages = field(init=False)
    gateway: Actor = field(init=False)
    pools: Actor = field(init=False)
    handshake: Actor = field(init=False)
    leases: Actor = field(init=False)
    scheduler: Actor = field(init=False)
    completion: Actor = field(init=False)
    replies: WorkerReplies = field(init=False)

    def __post_init__(self) -> None:
        self.dispatcher = Dispatcher(self.loop, self.supervisor)

    def with_reason(self, text: str, seconds: float) -> str:
        """`text`, of what did not come within `seconds`, with what the daemon knows of why."""
        starved = self.starved(seconds)
        return f"{text}; {starved}" if starved else text

    @property
    def actors(self) -> tuple[Actor, ...]:
        """All six, in the order in which requests pass them."""
        return (self.gateway, self.pools, self.handshake, self.leases, self.scheduler, self.completion)
