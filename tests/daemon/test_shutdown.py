import asyncio

import pytest

from kvd.daemon import shutdown
from kvd.daemon.shutdown import Part, Parts, Shutdown


class Actor:
    waiting = 0

    def __init__(self, name, events):
        self.actor = self.connections = self
        self.name = name
        self.events = events

    def call(self, method):
        method()

    def drain(self):
        self.events.append((self.name, "drain"))

    def stop(self):
        self.events.append((self.name, "stop"))

    close_all = stop


class Actors:
    def __init__(self, events):
        self.gateway, self.leases, self.scheduler, self.completion = (
            Actor(name, events) for name in ("gateway", "leases", "scheduler", "completion")
        )
        self.all = (self.gateway, self.leases, self.scheduler, self.completion)


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


async def drains(actor, events):
    while (actor, "drain") not in events:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def all_drain(ending, events):
    for busy in (("leases", "scheduler"), ("completion",)):
        await drains(busy[-1], events)
        for actor in busy:
            ending.is_idle(actor)


async def test_workers_keep_their_sessions_until_the_transport_has_ended():
    events = []

    async def stop():
        events.append(("transport", "ended"))

    ending = Shutdown(lambda: False)
    run = asyncio.ensure_future(ending.run(Actors(events), parts(events, stop), grace=60.0))
    await all_drain(ending, events)
    assert await run == ""
    assert events[-3:] == [("transport", "ended"), ("gateway", "stop"), ("workers", "closed")]
    assert events.index(("peers", "closed")) < events.index(("transport", "ended"))
    assert events[0] == ("gateway", "drain")


async def test_workers_hear_what_the_transport_says_last_before_their_sessions_end():
    events = []
    actors = Actors(events)

    def tell():
        events.append(("completion", "told"))
        actors.completion.waiting = 0

    async def stop():
        actors.completion.waiting = 1
        asyncio.get_running_loop().call_soon(tell)

    ending = Shutdown(lambda: False)
    run = asyncio.ensure_future(ending.run(actors, parts(events, stop), grace=60.0))
    await all_drain(ending, events)
    assert await run == ""
    assert events.index(("completion", "told")) < events.index(("gateway", "stop"))


async def test_a_second_signal_ends_the_wait_for_running_work():
    events, ending = [], Shutdown(lambda: False)
    ending.hurry()
    assert await ending.run(Actors(events), parts(events, lambda: asyncio.sleep(0)), grace=1e6) == ""
    assert ("scheduler", "stop") in events


async def test_a_daemon_that_failed_takes_nothing_new_and_does_not_wait_for_running_work():
    events, ending = [], Shutdown(lambda: True)
    ending.hurry()
    assert await ending.run(Actors(events), parts(events, lambda: asyncio.sleep(0)), grace=1e6) == ""
    assert events[0] == ("gateway", "drain")
    assert not {("leases", "drain"), ("scheduler", "drain")} & set(events)


async def test_a_daemon_that_failed_answers_no_peer_while_it_tells_its_workers_why():
    events, ending = [], Shutdown(lambda: True)
    run = asyncio.ensure_future(ending.run(Actors(events), parts(events, lambda: asyncio.sleep(0)), grace=1e6))
    await drains("completion", events)
    assert ("peers", "closed") in events
    for _ in range(10):
        await asyncio.sleep(0)
    assert ("workers", "closed") not in events
    ending.is_idle("completion")
    assert await run == ""
    assert events[-1] == ("workers", "closed")


async def test_what_does_not_stop_is_named(monkeypatch):
    monkeypatch.setattr(shutdown, "STOP_SECONDS", 0.01)
    events, never, ending = [], asyncio.Event(), Shutdown(lambda: True)
    ending.hurry()
    left = await ending.run(Actors(events), parts(events, never.wait), grace=1.0)
    assert left == "the transport"
    assert ("workers", "closed") not in events


@pytest.mark.parametrize("actor", ["leases", "scheduler"])
async def test_both_actors_that_have_work_are_waited_for(actor):
    events, ending = [], Shutdown(lambda: False)
    run = asyncio.ensure_future(ending.run(Actors(events), parts(events, lambda: asyncio.sleep(0)), grace=1e6))
    await drains("scheduler", events)
    ending.is_idle(actor)
    for _ in range(10):
        await asyncio.sleep(0)
    assert (actor, "stop") not in events
    ending.hurry()
    await run
