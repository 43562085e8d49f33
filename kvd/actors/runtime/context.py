"""What every actor of one daemon shares: the loop, the settings, and what a daemon is told. No state of any of them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvd.actors.runtime.actor import Dispatcher, Loop, Supervisor
from kvd.actors.runtime.settings import Settings
from kvd.actors.runtime.spans import Spans
from kvd.metrics import Metrics


@dataclass(slots=True, kw_only=True)
class ActorContext:
    """See the module's text."""

    loop: Loop
    settings: Settings
    metrics: Metrics
    supervisor: Supervisor
    condition: Callable[[str, str | None], None]
    """Says why the daemon is not ready (or, with None, that this reason is gone)."""
    idle: Callable[[str], None]
    """Called with the name of an actor that was told to drain, once it has nothing left to do."""
    note: Callable[[str, str | None, float], None] = lambda _name, _text, _seconds: None
    """Says what is wrong, and for how many seconds already, with one peer while the daemon serves others (or, with
    None, that it is well again)."""
    spans: Spans | None = None
    """Traces requests; None if tracing is off."""
    starved: Callable[[float], str] = lambda _seconds: ""
    """Says how long the daemon waited for a processor in the last so many seconds, if that was long; else empty."""
    dispatcher: Dispatcher = field(init=False)

    def __post_init__(self) -> None:
        self.dispatcher = Dispatcher(self.loop, self.supervisor)

    def with_reason(self, text: str, seconds: float) -> str:
        """`text`, of what did not come within `seconds`, with what the daemon knows of why."""
        starved = self.starved(seconds)
        return f"{text}; {starved}" if starved else text
