"""What workers and peers say in one turn of the loop, while claims wait to be judged, or their readers to be told."""

import pytest
from msgspec.structs import replace

from kvd import limits
from kvd.net.interface import PeerAsked, WorkerFrame
from kvd.protocol import codec, ticket
from kvd.protocol.peer import Fence, Follow, Grant, Grown, Held, Release, Settle, Settled
from kvd.protocol.types import Span
from kvd.protocol.worker import Cancel, Extend, Offer, Released
from tests.actors.stage import SECRET, Stage, ids, make_claim

CLAIMS = 5


@pytest.fixture
def stage():
    stage = Stage()
    stage.attach()
    return stage


def in_one_turn(stage, *messages):
    """A worker and a peer say all of this before the first of it has been dealt with."""
    for message in messages:
        frame = codec.encode(message)
        if isinstance(message, Offer | Extend | Cancel):
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


@pytest.mark.parametrize("leaves", [Release(1, finished=True), Settle((Fence(1, 0),))], ids=["release", "settle"])
def test_a_consumer_that_waits_is_served_though_another_leaves_as_the_offer_comes(stage, leaves):
    in_one_turn(stage, make_claim(1, consumer="A"), make_claim(2, consumer="B"))
    in_one_turn(stage, offer(), leaves)
    [grant] = [answer for _, answer in stage.answers if not isinstance(answer, Settled)]
    assert (type(grant), grant.claim) == (Grant, 2)
    assert stage.asked_by_peer(Fence(2, grant.generation)) == [Held(2)]
    assert [(item.offer, item.reason) for item in stage.notified if isinstance(item, Released)] == [("o", "read")]


def test_a_reader_that_left_before_one_offer_is_judged_behind_those_that_wait_for_the_next_of_its_name(stage):
    in_one_turn(stage, make_claim(1, consumer="A"), Release(1, finished=True))
    in_one_turn(stage, WRONG, WITHDRAWN, make_claim(2, consumer="B"), offer())
    assert granted(stage) == [2]


def test_claims_are_judged_once_however_often_offers_of_their_name_come_and_go_meanwhile(stage):
    in_one_turn(stage, *(make_claim(number) for number in range(CLAIMS)))
    judged = []
    stage.actors.leases.claims._judging._handle = judged.append
    in_one_turn(stage, *[WRONG, WITHDRAWN] * 20)
    assert [[claim.key.claim for claim in claims] for claims in judged] == [list(range(CLAIMS))]


def test_readers_are_told_once_however_often_their_offer_is_extended_meanwhile(stage, monkeypatch):
    monkeypatch.setattr(limits, "BATCH_BLOCKS", 1)
    in_one_turn(stage, Offer(1, "o", 0, (), 30.0, SECRET, grows=True))
    for number in range(CLAIMS):
        asked = replace(make_claim(number, consumer=f"c{number}"), proof=ticket.proof(SECRET, "w", "o", 0, ()))
        in_one_turn(stage, asked, Follow(number, 0))
    behind = stage.actors.leases.claims._answers._behind
    tell, lengths = behind._handle, []
    monkeypatch.setattr(behind, "_handle", lambda some: tell(some) or lengths.append(len(behind._items)))
    in_one_turn(stage, *(Extend(7, "o", 2 * number + 2, (Span(0, number, ids(number)),)) for number in range(4)))
    assert lengths == [4, 3, 2, 1, 0]
    assert [answer.parts for _, answer in stage.answers if isinstance(answer, Grown)] == [4] * CLAIMS
