import asyncio

import pytest

from kvd.actors.runtime.records import Drain, Stop
from kvd.daemon import shutdown
from kvd.daemon.shutdown import Part, Parts, Shutdown


class Actor:
    waiting = 0

    def __init__(self, name, events):
        self.name = name
        self.events = events

    def tell(self, message):
        self.events.append((self.name, type(message)))


class Context:
    def __init__(self, events):
        self.gateway, self.leases, self.scheduler, self.completion = (
            Actor(name, events) for name in ("gateway", "leases", "scheduler", "completion")
        )
        self.actors = (self.gateway, self.leases, self.scheduler, self.completion)


class Port:
    def __init__(self, name, events):
        self.name = name
        self.events = events

    def close(self):
        self.events.append((self.name, "closed"))


def parts(events, transport):
    return Parts(
        peers=Port("peers", events), workers=Port("workers", events), transport=[Part("the transport", transport)]
    )


async def test_workers_keep_their_sessions_until_the_transport_has_ended():
    events = []

    async def stop():
        events.append(("transport", "ended"))

    ending = Shutdown(lambda: False)
    run = asyncio.ensure_future(ending.run(Context(events), parts(events, stop), grace=60.0))
    for busy in (("leases", "scheduler"), ("completion",)):
        while (busy[-1], Drain) not in events:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for actor in busy:
            ending.is_idle(actor)
    assert await run == ""
    assert events[-3:] == [("transport", "ended"), ("gateway", Stop), ("workers", "closed")]
    assert events.index(("peers", "closed")) < events.index(("transport", "ended"))
    assert events[0] == ("gateway", Drain)


async def test_a_second_signal_ends_the_wait_for_running_work():
    events, ending = [], Shutdown(lambda: False)
    ending.hurry()
    assert await ending.run(Context(events), parts(events, lambda: asyncio.sleep(0)), grace=1e6) == ""
    assert ("scheduler", Stop) in events


async def test_a_daemon_that_failed_waits_for_nothing():
    events = []
    assert await Shutdown(lambda: True).run(Context(events), parts(events, lambda: asyncio.sleep(0)), grace=1e6) == ""
    assert not any(message is Drain for _, message in events)


async def test_what_does_not_stop_is_named(monkeypatch):
    monkeypatch.setattr(shutdown, "STOP_SECONDS", 0.01)
    events, never = [], asyncio.Event()
    left = await Shutdown(lambda: True).run(Context(events), parts(events, never.wait), grace=1.0)
    assert left == "the transport"
    assert ("workers", "closed") not in events


@pytest.mark.parametrize("actor", ["leases", "scheduler"])
async def test_both_actors_that_have_work_are_waited_for(actor):
    events, ending = [], Shutdown(lambda: False)
    run = asyncio.ensure_future(ending.run(Context(events), parts(events, lambda: asyncio.sleep(0)), grace=1e6))
    while ("scheduler", Drain) not in events:  # noqa: ASYNC110
        await asyncio.sleep(0)
    ending.is_idle(actor)
    for _ in range(10):
        await asyncio.sleep(0)
    assert (actor, Stop) not in events
    ending.hurry()
    await run
