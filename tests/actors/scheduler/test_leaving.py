"""Pulls that are cancelled before their producers' daemons are known: these are told when they can be."""

import pytest

from kvd import limits
from kvd.actors.runtime.actor import call
from kvd.protocol.peer import Claim, Grant, Release, Settle, Settled
from kvd.protocol.ticket import proof
from kvd.protocol.types import Span
from kvd.protocol.worker import Cancel, Cancelled, Detach, Pull
from tests.actors.scheduler.pulling import outcome
from tests.actors.stage import SECRET, Stage, ids, make_ticket, welcome_of


def cancel_unknown(stage, name="p", **pull):
    """A pull that is cancelled before anything is known of its producer."""
    assert stage.pull(name, **pull) == []
    stage.request(Cancel(5, name))
    assert stage.notified[-1] == Cancelled(name, quarantined=False)


def leaving(stage):
    return list(stage.actors.scheduler._leaving)


def told(stage):
    """The readers of which producers were told that they will not come, as the claims they would have made."""
    stage.run(0.1)
    return [fence.unclaimed for settle in stage.asks(Settle) for fence in settle.fences if not fence.generation]


def test_a_pull_that_was_cancelled_before_its_producer_was_known_lets_it_know_that_no_reader_will_come(stage):
    cancel_unknown(stage)
    assert told(stage) == []
    stage.peer_says(welcome_of())
    [claim] = told(stage)
    assert (claim.claim, claim.offer, claim.consumer, claim.readers) == (1, "o", "p", 1)
    assert claim.proof == proof(SECRET, "there", "o", 4, (Span(0, 0, ids(0, 1)),))
    assert leaving(stage) == []
    stage.run(0.5)
    assert told(stage) == [claim, claim]
    stage.peer_says(Settled((1,)))
    assert len(stage.actors.scheduler.transfers) == 0
    stage.run(1.5)
    assert told(stage) == [claim, claim]
    assert stage.asks(Claim) == stage.asks(Release) == []
    assert [type(item) for item in stage.notified] == [Cancelled]


def test_a_pull_that_is_cancelled_before_its_claim_is_answered_lets_its_producer_know_until_it_has_heard(stage):
    stage.pull()
    stage.peer_says(welcome_of())
    stage.request(Cancel(5, "p"))
    assert outcome(stage) == Cancelled("p", quarantined=False)
    [claim] = stage.asks(Claim)
    assert told(stage) == [claim]
    stage.peer_says(Grant(1, 7, 1, 5))
    stage.run(0.5)
    assert told(stage) == [claim, claim]
    stage.peer_says(Settled((1,)))
    stage.run(1.5)
    assert told(stage) == [claim, claim]
    assert ("read", 1) not in stage.commands
    assert len(stage.actors.scheduler.transfers) == 0


def test_its_name_and_its_blocks_are_free_at_once(stage):
    cancel_unknown(stage)
    assert stage.pull("p") == []
    stage.peer_says(welcome_of())
    [left] = told(stage)
    [claim] = stage.asks(Claim)
    assert {left.claim, claim.claim} == {1, 2}


def test_all_its_producers_hear_of_it_once_the_last_of_them_is_known(stage):
    other = make_ticket(address="tcp://other:1")
    cancel_unknown(stage)
    cancel_unknown(stage, "q", ticket=other)
    stage.peer_says(welcome_of(), link=2)
    assert [claim.consumer for claim in told(stage)] == ["q"]
    stage.peer_says(welcome_of(), link=1)
    assert [claim.consumer for claim in told(stage)] == ["q", "p"]


def test_a_hold_that_was_cancelled_before_its_producer_was_known_lets_it_know_too(stage):
    stage.request(Pull(2, "h", make_ticket(), (), 3600.0, None, "r", hold=True))
    stage.request(Cancel(5, "h"))
    stage.peer_says(welcome_of())
    assert [claim.consumer for claim in told(stage)] == ["r"]


def test_it_waits_for_a_pool_that_may_yet_come_back(stage):
    cancel_unknown(stage)
    for _ in range(4):
        stage.peer_says(welcome_of(pools=()))
        stage.run(0.6)
    assert told(stage) == []
    stage.peer_says(welcome_of())
    stage.run(0.5)
    assert {claim.consumer for claim in told(stage)} == {"p"}


def test_it_ends_quietly_where_its_producer_is_lost_or_does_not_fit(stage):
    cancel_unknown(stage)
    cancel_unknown(stage, "q", ticket=make_ticket(address="tcp://other:1", daemon="somebody"))
    call(stage.actors.scheduler.peer_down, "tcp://peer:1", "gone")
    stage.run()
    stage.peer_says(welcome_of(), link=2)  # says that it is `peer`
    assert leaving(stage) == []
    assert told(stage) == []
    assert [type(item) for item in stage.notified] == [Cancelled, Cancelled]


def test_it_waits_for_a_producer_that_restarts(stage):
    cancel_unknown(stage)
    call(stage.actors.scheduler.peer_down, "tcp://peer:1", "new run", restarted=True)
    stage.run()
    stage.peer_says(welcome_of())
    assert [claim.consumer for claim in told(stage)] == ["p"]


def test_a_producer_is_not_forgotten_while_it_is_to_be_told(stage):
    cancel_unknown(stage)
    call(stage.actors.scheduler.peer_idle, "tcp://peer:1", 1)
    stage.run()
    assert "tcp://peer:1" in stage.actors.handshake._peers.by_address
    stage.peer_says(welcome_of())
    assert len(told(stage)) == 1
    stage.peer_says(Settled((1,)))
    call(stage.actors.scheduler.peer_idle, "tcp://peer:1", 1)
    stage.run()
    assert "tcp://peer:1" not in stage.actors.handshake._peers.by_address


def test_it_is_given_up_after_a_while():
    stage = Stage(tombstone=2.0)
    stage.attach()
    cancel_unknown(stage)
    stage.run(1.9)
    assert len(leaving(stage)) == 1
    stage.run(0.2)
    assert leaving(stage) == []
    assert not len(stage.actors.scheduler._leaving._due)
    stage.peer_says(welcome_of())
    assert told(stage) == []


@pytest.mark.parametrize("bound", ["MAX_LEAVING", "MAX_LEAVING_TICKET_BYTES"])
def test_the_oldest_are_given_up_beyond_their_bounds(stage, monkeypatch, bound):
    cancel_unknown(stage, "p0")
    [pull] = leaving(stage)
    monkeypatch.setattr(limits, bound, 2 if bound == "MAX_LEAVING" else 2 * pull.ticket_bytes)
    for number in range(1, 5):
        cancel_unknown(stage, f"p{number}")
    assert [each.key[1] for each in leaving(stage)] == ["p3", "p4"]
    stage.peer_says(welcome_of())
    assert [claim.consumer for claim in told(stage)] == ["p3", "p4"]


@pytest.mark.parametrize("bound", ["MAX_LEAVING", "MAX_LEAVING_TICKET_BYTES"])
def test_a_producer_that_does_not_answer_is_told_of_no_more_than_the_bound(stage, monkeypatch, bound):
    for number in range(5):
        stage.pull(f"p{number}")
        if not number:
            size = stage.actors.scheduler._pulls["w", "p0"].ticket_bytes
            stage.peer_says(welcome_of())
        monkeypatch.setattr(limits, bound, 2 if bound == "MAX_LEAVING" else 2 * size)
        stage.request(Cancel(5, f"p{number}"))
    transfers = stage.actors.scheduler.transfers
    assert [transfer.pull.key[1] for transfer in transfers._open.values()] == ["p3", "p4"]
    assert [claim.consumer for claim in told(stage)] == ["p3", "p4"]
    assert stage.asks(Release) == [Release(number, finished=True) for number in (1, 2, 3)]
    for number in (4, 5):
        stage.peer_says(Settled((number,)))
    assert len(transfers) == 0
    assert list(transfers._leaving) == []


def test_it_ends_with_the_pool_of_its_worker(stage):
    cancel_unknown(stage)
    stage.session(Detach())
    assert leaving(stage) == []


def test_a_drain_does_not_wait_for_it(stage):
    cancel_unknown(stage)
    call(stage.actors.scheduler.drain)
    stage.run()
    assert stage.idle == ["scheduler"]
