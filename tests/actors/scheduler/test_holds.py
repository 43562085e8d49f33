"""Pulls that only hold an offer, for a request that has no blocks yet."""

import pytest

from kvd.actors.runtime.actor import call
from kvd.errors import ErrorCode
from kvd.protocol.peer import Broken, Claim, Grant, Pong, Refuse, Release, Renew
from kvd.protocol.types import Span
from kvd.protocol.worker import Cancel, Cancelled, Failed, Pull
from kvd.transport.interface import PeerFailed
from tests.actors.scheduler.pulling import outcome
from tests.actors.stage import ids, make_ticket, welcome_of

ONE_HOUR = 3600.0


@pytest.fixture
def held(stage):
    """A stage with an offer that is held."""
    assert stage.request(Pull(2, "h", make_ticket(), (), ONE_HOUR, None, "r", hold=True)) == []
    stage.peer_says(welcome_of())
    stage.peer_says(Grant(1, 7, 1, 5))
    return stage


def test_a_hold_is_renewed_and_reads_nothing(held):
    for _ in range(10):
        held.pongs(5)
    assert len(held.asks(Renew)) >= 9
    assert held.asks(Claim)[0].consumer == "r"
    assert not any(command[0] == "read" for command in held.commands)
    assert held.notified == []


def test_a_cancelled_hold_says_that_its_consumer_has_finished(held):
    held.request(Cancel(3, "h"))
    assert outcome(held) == Cancelled("h", quarantined=False)
    assert held.asks(Release) == [Release(1, finished=True)]


def test_a_hold_ends_with_its_workers_session_and_its_consumer_may_come_again(held):
    held.hang_up()
    assert held.asks(Release) == [Release(1, finished=False)]


def test_the_pulls_of_a_worker_whose_session_ends_go_on(held):
    assert held.pull("p", ticket=make_ticket()) == []
    held.peer_says(Grant(2, 7, 1, 5))
    held.hang_up()
    assert held.asks(Release) == [Release(1, finished=False)]
    assert ("abort", 2) not in held.commands


def test_a_hold_outlasts_its_offer_without_an_error(held):
    held.peer_says(Broken((1,), "lease_broken", "the offer has ended (read)"))
    assert held.notified == []
    held.request(Cancel(3, "h"))
    assert outcome(held) == Cancelled("h", quarantined=False)


def test_a_hold_whose_peer_the_transport_has_lost_gives_its_claim_back_as_messages_may_still_pass(held):
    held.transport_says(PeerFailed("peer#1", "its process has ended"))
    assert outcome(held).code == ErrorCode.PEER_LOST
    assert held.asks(Release) == [Release(1, finished=False)]


def test_a_hold_of_an_offer_that_is_gone_fails(stage):
    stage.request(Pull(2, "h", make_ticket(), (), ONE_HOUR, None, "r", hold=True))
    stage.peer_says(welcome_of())
    stage.peer_says(Refuse(1, "offer_gone", "it has expired"))
    assert outcome(stage) == Failed("h", "offer_gone", "it has expired", quarantined=False)


def test_a_daemon_that_drains_waits_for_no_hold(held):
    call(held.actors.scheduler.drain)
    held.run()
    assert outcome(held).code == ErrorCode.SHUTTING_DOWN
    assert "scheduler" in held.idle


def test_a_hold_is_claimed_even_if_the_lease_is_known(held):
    held.peer_says(Pong(1, 5))
    assert held.request(Pull(3, "i", make_ticket(incarnation=5), (), ONE_HOUR, None, "s", hold=True)) == []
    assert [claim.consumer for claim in held.asks(Claim)] == ["r", "s"]


def test_a_hold_with_blocks_is_refused(stage):
    [error] = stage.request(Pull(2, "h", make_ticket(), (Span(0, 0, ids(1)),), 5.0, hold=True))
    assert error.code == ErrorCode.BAD_MESSAGE
