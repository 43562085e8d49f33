"""What passes between peers, leases and scheduler past the handshake's mailbox."""

import pytest

from kvd.actors.handshake.peer_server import Greeting
from kvd.net.interface import PeerAnswered, PeerAsked
from kvd.protocol import codec
from kvd.protocol.peer import Fence, Grant, Held, Hello, Ping, Pong, Refuse, Release, Renew, Welcome
from kvd.protocol.worker import Done
from tests.actors.stage import INCARNATION, Stage, make_claim, welcome_of


@pytest.fixture
def stage():
    stage = Stage(heartbeat=1.0)
    stage.attach()
    return stage


def told(stage, actor):
    """The calls of an actor that are made from now on: the name of each method, and its arguments."""
    calls = []
    put = stage.context.dispatcher.put

    def watched(to, method, arguments):
        if to is actor:
            calls.append((method.__name__, *arguments))
        put(to, method, arguments)

    stage.context.dispatcher.put = watched
    return calls


def receive(stage, *messages, sender=b"peer"):
    for message in messages:
        stage.dependencies.peer_port.on_event(PeerAsked(sender, codec.encode(message)))


def test_requests_about_leases_reach_the_leases_in_the_order_in_which_they_came(stage):
    requests = [make_claim(), Renew((1,)), Fence(1, 1), Release(1, finished=True)]
    to_leases, to_handshake = told(stage, stage.actors.leases), told(stage, stage.actors.handshake)
    receive(stage, Hello("peer", 1), *requests, Ping(1))
    assert to_leases == [("requested", b"peer", "peer", request) for request in requests]
    hello = Greeting(b"peer", "", "peer", Hello("peer", 1))
    assert to_handshake == [("greeted", hello), ("pinged", b"peer", Ping(1))]


def test_a_claim_right_after_a_hello_is_granted(stage):
    stage.offer()
    receive(stage, Hello("peer", 1), make_claim())
    stage.run()
    assert {type(reply) for _, reply in stage.answers} == {Welcome, Grant}


def test_garbage_between_two_requests_is_refused_and_holds_up_neither(stage):
    stage.offer()
    receive(stage, make_claim())
    stage.dependencies.peer_port.on_event(PeerAsked(b"peer", b"\xc1"))
    receive(stage, Ping(7))
    stage.run()
    assert [type(reply) for _, reply in stage.answers] == [Refuse, Grant, Pong]
    assert stage.answers[2][1] == Pong(7, INCARNATION)


def test_answers_about_claims_go_to_the_scheduler_and_those_of_no_link_nowhere(stage):
    stage.pull(timeout=60.0)
    stage.peer_says(welcome_of())
    to_scheduler = told(stage, stage.actors.scheduler)
    for link in (1, 2):
        stage.dependencies.peer_port.on_event(PeerAnswered(link, codec.encode(Grant(1, 7, 1, 5))))
    assert to_scheduler == [("answered", "tcp://peer:1", Grant(1, 7, 1, 5))]
    stage.run()
    stage.landed(1)
    stage.peer_says(Held(1))
    assert stage.notified == [Done("p")]


def test_a_peer_that_answers_about_claims_is_not_lost_though_it_answers_no_ping(stage):
    stage.pull(timeout=60.0)
    stage.peer_says(welcome_of())
    for _ in range(8):
        stage.run(1.0)
        stage.peer_says(Grant(1, 7, 1, 5))
    assert stage.notified == []


def test_a_request_to_an_address_without_a_link_is_lost(stage):
    stage.actors.channel.ask("tcp://nobody:1", Renew((1,)))
    assert stage.to_peers == []
