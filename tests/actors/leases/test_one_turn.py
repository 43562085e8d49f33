"""What workers and peers say in one turn of the loop, while claims wait to be judged, or their readers to be told."""

import pytest

from kvd.net.interface import PeerAsked, WorkerFrame
from kvd.protocol import codec
from kvd.protocol.peer import Grant, Release
from kvd.protocol.types import Span
from kvd.protocol.worker import Cancel, Offer
from tests.actors.stage import SECRET, Stage, ids, make_claim


@pytest.fixture
def stage():
    stage = Stage()
    stage.attach()
    return stage


def in_one_turn(stage, *messages):
    """A worker and a peer say all of this before the first of it has been dealt with."""
    for message in messages:
        frame = codec.encode(message)
        if isinstance(message, Offer | Cancel):
            stage.actors.gateway.received(WorkerFrame(b"\1" * 16, frame, 1000))
        else:
            stage.dependencies.peer_port.on_event(PeerAsked(b"peer", frame, ""))
    stage.run()


def offer(secret=SECRET):
    return Offer(1, "o", 4, (Span(0, 0, ids(0, 1)),), 30.0, secret, 1)


WRONG, WITHDRAWN = offer(bytes(16)), Cancel(3, "o")


def granted(stage):
    return [answer.claim for _, answer in stage.answers if isinstance(answer, Grant)]


def test_a_claim_that_is_let_go_before_it_is_judged_is_not_taken_for_a_later_one_of_its_number(stage):
    again = make_claim(consumer="another")
    in_one_turn(stage, make_claim(), WRONG, WITHDRAWN, Release(1, finished=False), again)
    assert stage.answers == []
    [waits] = stage.actors.leases.claims._waiting.all()
    assert waits.request == again
    in_one_turn(stage, offer())
    assert granted(stage) == [1]
    assert stage.actors.leases.claims.waiting == 0
