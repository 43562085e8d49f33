"""The transport to other hosts ends and comes back under new keys: what this daemon says of itself meanwhile."""

import pytest

from kvd.protocol.peer import Hello, Ping, Pong
from kvd.transport.interface import NetworkDown, NetworkUp
from tests.actors.stage import INCARNATION, Stage

HELLO = Hello("peer", 3)


@pytest.fixture
def stage():
    stage = Stage()
    stage.attach()
    return stage


def happens(stage, event):
    stage.dependencies.transport.on_event(event)
    stage.run()


def test_a_hello_waits_for_the_new_keys_and_a_ping_for_nothing(stage):
    happens(stage, NetworkDown("signal SIGSEGV"))
    assert stage.asked_by_peer(HELLO) == []
    assert stage.asked_by_peer(Ping(1)) == [Pong(1, INCARNATION)]
    stage.answers.clear()
    happens(stage, NetworkUp(b"new keys"))
    ((_, welcome),) = stage.answers
    assert welcome.metadata == b"new keys"
    (welcome,) = stage.asked_by_peer(HELLO)
    assert welcome.metadata == b"new keys"


def test_peers_of_this_host_wait_no_longer_than_a_moment_for_a_transport_that_does_not_come_back(stage):
    happens(stage, NetworkDown("signal SIGSEGV"))
    assert stage.asked_by_peer(HELLO) == []
    stage.run(6.0)
    ((_, welcome),) = stage.answers
    assert welcome.metadata == b"meta", "what the transport said when it went down"
    happens(stage, NetworkDown("signal SIGSEGV"))
    happens(stage, NetworkUp(b"new keys"))
    (welcome,) = stage.asked_by_peer(HELLO)
    assert welcome.metadata == b"new keys"


def test_the_daemon_is_not_ready_while_other_hosts_cannot_be_reached(stage):
    happens(stage, NetworkDown("signal SIGSEGV"))
    assert stage.conditions["network"] == "signal SIGSEGV; it is being started again"
    happens(stage, NetworkUp(b"new keys"))
    assert stage.conditions["network"] is None
