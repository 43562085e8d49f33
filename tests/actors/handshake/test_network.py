"""The transport to other hosts ends and comes back under new keys: what this daemon says of itself meanwhile."""

import pytest

from kvd.protocol.peer import Hello, Ping, Pong
from kvd.transport.interface import Described, NetworkDown, NetworkUp, Registered
from tests.actors.stage import INCARNATION, Stage

HELLO = Hello("peer", 3, host="another")


@pytest.fixture
def stage():
    stage = Stage()
    stage.attach()
    return stage


def says(stage, event):
    """The transport's metadata is then that of the event, as its interface promises."""
    if isinstance(event, NetworkUp | Registered):
        stage.dependencies.transport.metadata = event.metadata
    stage.dependencies.transport.on_event(event)


def happens(stage, event):
    says(stage, event)
    stage.run()


def test_a_hello_of_another_host_hears_that_the_daemon_lives_until_the_new_keys_are_there(stage):
    happens(stage, NetworkDown("signal SIGSEGV"))
    assert stage.asked_by_peer(HELLO) == [Pong(0, INCARNATION)]
    assert stage.asked_by_peer(Ping(1)) == [Pong(1, INCARNATION)]
    happens(stage, NetworkUp(b"new keys"))
    (welcome,) = stage.asked_by_peer(HELLO)
    assert (welcome.metadata, welcome.starts) == (b"new keys", 1)
    assert stage.asked_by_peer(Ping(2)) == [Pong(2, INCARNATION, 1)]


def test_a_pool_that_was_registered_just_before_does_not_bring_the_old_keys_back():
    """As after a daemon stood still: it hears of all three at once."""
    stage = Stage()
    stage.dependencies.transport.register = lambda *_: None
    stage.attach()
    says(stage, Registered(1, b"old keys"))
    says(stage, NetworkDown("signal SIGSEGV"))
    says(stage, NetworkUp(b"new keys"))
    stage.run()
    (welcome,) = stage.asked_by_peer(HELLO)
    assert welcome.metadata == b"new keys"
    assert [pool.pool for pool in welcome.pools] == ["w"]


def test_a_hello_that_waits_for_its_keys_as_the_transport_ends_hears_that_too_and_gets_no_keys_that_are_none():
    stage = Stage(rights=lambda _key: ("w",))
    stage.attach()
    asked = []
    stage.dependencies.transport.describe = asked.append
    assert stage.asked_by_peer(HELLO) == []
    before = len(stage.answers)
    stage.dependencies.transport.on_event(NetworkDown("signal SIGSEGV"))
    for pools in asked:
        happens(stage, Described(pools, b""))
    assert [reply for _, reply in stage.answers[before:]] == [Pong(0, INCARNATION)]


def test_peers_of_this_host_do_not_wait_for_a_transport_that_they_do_not_need(stage):
    happens(stage, NetworkDown("signal SIGSEGV"))
    (welcome,) = stage.asked_by_peer(Hello("peer", 3, host=stage.context.settings.host))
    assert welcome.metadata == b"meta", "what the transport said when it went down"


def test_a_transport_that_does_not_come_back_is_said_to_peers_of_other_hosts_and_forgotten_when_it_does(stage):
    happens(stage, NetworkDown("signal SIGSEGV"))
    stage.run(20.0)
    happens(stage, NetworkDown("signal SIGSEGV"))
    stage.run(11.0)
    (refuse,) = stage.asked_by_peer(HELLO)
    assert refuse.code == "transport"
    assert "to other hosts ended 31 s ago" in refuse.text
    happens(stage, NetworkUp(b"new keys"))
    (welcome,) = stage.asked_by_peer(HELLO)
    assert welcome.metadata == b"new keys"


def test_the_daemon_is_not_ready_while_other_hosts_cannot_be_reached(stage):
    happens(stage, NetworkDown("signal SIGSEGV"))
    assert stage.conditions["network"] == "signal SIGSEGV; it is being started again"
    happens(stage, NetworkUp(b"new keys"))
    assert stage.conditions["network"] is None
