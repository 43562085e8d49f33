"""What every actor of one daemon shares: the loop, the settings, and where to tell what. No state of any of them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvd.actors.runtime.actor import Actor, Dispatcher, Supervisor
from kvd.actors.runtime.loop import Loop
from kvd.actors.runtime.replies import WorkerReplies
from kvd.actors.runtime.settings import Settings
from kvd.actors.runtime.spans import Spans
from kvd.metrics import Metrics

SetCondition = Callable[[str, str | None], None]


@dataclass(slots=True, kw_only=True)
class ActorContext:
    """The actors by their names, for telling, filled in once by whoever builds the daemon."""

    loop: Loop
    settings: Settings
    metrics: Metrics
    supervisor: Supervisor
    condition: SetCondition
    """Says why the daemon is not ready (or, with None, that this reason is gone)."""
    idle: Callable[[str], None]
    """Called by an actor that was told to drain, when nothing of it is left."""
    spans: Spans | None = None
    """Who traces requests, if somebody does."""
    dispatcher: Dispatcher = field(init=False)
    gateway: Actor = field(init=False)
    pools: Actor = field(init=False)
    handshake: Actor = field(init=False)
    leases: Actor = field(init=False)
    scheduler: Actor = field(init=False)
    completion: Actor = field(init=False)
    replies: WorkerReplies = field(init=False)

    def __post_init__(self) -> None:
        self.dispatcher = Dispatcher(self.loop, self.supervisor)

    @property
    def actors(self) -> tuple[Actor, ...]:
        """All six, in the order in which requests pass them."""
        return (self.gateway, self.pools, self.handshake, self.leases, self.scheduler, self.completion)
