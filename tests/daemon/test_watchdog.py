from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from kvd import limits
from kvd.actors.completion.actor import CompletionActor
from kvd.actors.gateway.actor import GatewayActor
from kvd.actors.handshake.actor import HandshakeActor
from kvd.actors.leases.actor import LeasesActor
from kvd.actors.pools.actor import PoolsActor
from kvd.actors.runtime.actor import Actor, Dispatcher, call
from kvd.actors.scheduler.actor import SchedulerActor
from kvd.daemon.health import Watchdog
from kvd.metrics import Metrics


class Turned:
    """A loop that runs what is due when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self._soon: list[tuple[Callable[..., object], tuple]] = []
        self._later: list[tuple[float, Callable[..., object], tuple]] = []

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        self._soon.append((callback, args))

    def call_later(self, delay: float, callback: Callable[..., object], *args: object) -> None:
        self._later.append((self.now + delay, callback, args))

    def turn(self, seconds: float = 0.0) -> None:
        self.now += seconds
        due = [entry for entry in self._later if entry[0] <= self.now]
        self._later = [entry for entry in self._later if entry[0] > self.now]
        for _, callback, args in due:
            callback(*args)
        while self._soon:
            callback, args = self._soon.pop(0)
            callback(*args)


class Quick(Actor):
    name = "quick"


class Stuck(Actor):
    name = "stuck"

    def call(self, method: object, *arguments: object, **named: object) -> None:
        """Never calls anything."""


class Pair:
    def __init__(self, *kinds: type[Actor]) -> None:
        self.loop = Turned()
        dispatcher = Dispatcher(self.loop, None)
        self.metrics = Metrics(CollectorRegistry())
        self.pings: list[int] = []
        self.fed = 0
        self.watchdog = Watchdog(
            self.loop,
            1.0,
            actors=[kind(dispatcher) for kind in kinds],
            ping=self.pings.append,
            fed=self.feed,
            metrics=self.metrics,
        )
        self.watchdog.start()
        self.loop.turn()

    def feed(self) -> None:
        self.fed += 1

    def misses(self, part: str) -> float | None:
        return self.metrics.registry.get_sample_value("kvd_watchdog_misses_total", {"part": part})


def test_it_is_fed_once_a_round_when_actors_and_transport_have_answered() -> None:
    pair = Pair(Quick)
    assert pair.fed == 0
    pair.watchdog.transport_answered(1)
    pair.watchdog.transport_answered(1)
    assert pair.fed == 1
    pair.loop.turn(1.0)
    pair.watchdog.transport_answered(2)
    assert pair.fed == 2
    assert pair.misses("quick") is None


def test_an_actor_that_does_not_handle_its_mailbox_starves_it_and_is_named() -> None:
    pair = Pair(Quick, Stuck)
    pair.watchdog.transport_answered(1)
    pair.loop.turn(1.0)
    assert pair.fed == 0
    assert pair.misses("stuck") == 1.0
    assert pair.misses("transport") is None


def test_a_full_mailbox_is_a_silent_part_and_does_not_end_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAILBOX_MESSAGES", 0)
    pair = Pair(Quick)
    pair.loop.turn(1.0)
    assert pair.misses("quick") == 1.0
    monkeypatch.undo()
    pair.loop.turn(1.0)
    pair.watchdog.transport_answered(3)
    assert pair.fed == 1


def test_a_transport_that_does_not_turn_starves_it_and_a_late_answer_does_not_count() -> None:
    pair = Pair(Quick)
    pair.loop.turn(1.0)
    pair.watchdog.transport_answered(1)
    assert pair.fed == 0
    assert pair.misses("transport") == 1.0


@pytest.mark.parametrize(
    "kind", [GatewayActor, PoolsActor, HandshakeActor, LeasesActor, SchedulerActor, CompletionActor]
)
def test_every_actor_answers_a_probe(kind: type[Actor]) -> None:
    answers: list[str] = []
    loop = Turned()
    actor = kind.__new__(kind)
    Actor.__init__(actor, Dispatcher(loop, None))
    call(actor.probe, answers.append)
    loop.turn()
    assert answers == [kind.name]
