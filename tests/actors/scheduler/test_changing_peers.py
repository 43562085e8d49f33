from kvd.errors import ErrorCode
from kvd.protocol.peer import (
    Claim,
    Grant,
    Held,
    Hello,
    PoolInfo,
    Welcome,
)
from kvd.protocol.ticket import Ticket, TicketRank, join
from kvd.protocol.types import Span
from kvd.protocol.worker import Done, Freed
from tests.actors.scheduler.pulling import outcome
from tests.actors.stage import CACHE, SECRET, ids, make_ticket, welcome_of
from tests.simulator.virtual.cache import make_cache


def test_a_known_peer_is_asked_again_for_a_pool_that_it_has_not_named(stage):
    stage.pull()
    stage.peer_says(welcome_of(pools=("earlier",)))
    assert stage.notified == []
    assert len(stage.asks(Hello)) == 2
    stage.peer_says(welcome_of(pools=("earlier", "there")))
    assert len(stage.asks(Claim)) == 1


def test_a_peer_that_has_lost_the_pool_since_the_ticket_is_not_asked_for_ever(stage):
    stage.pull(ticket=make_ticket(incarnation=5), timeout=60.0)
    for _ in range(4):
        stage.peer_says(welcome_of(pools=("earlier",)))
    assert outcome(stage).code == ErrorCode.OFFER_GONE


def wait_for_the_pool(stage, timeout):
    """A pull of a ticket that was made while the daemon was away, whose worker has not come back to it."""
    stage.pull(ticket=make_ticket(incarnation=0), timeout=timeout)
    for _ in range(4):
        stage.peer_says(welcome_of(pools=("earlier",)))
    assert stage.notified == []
    return len(stage.asks(Hello))


def test_a_pull_waits_for_the_worker_that_has_not_come_back_to_its_daemon(stage):
    asked = wait_for_the_pool(stage, timeout=60.0)
    stage.run(0.4)
    assert len(stage.asks(Hello)) == asked
    stage.run(0.2)
    assert len(stage.asks(Hello)) == asked + 1
    stage.peer_says(welcome_of(pools=("earlier",)))
    stage.run(0.6)
    stage.peer_says(welcome_of(pools=("earlier", "there")))
    assert stage.notified == []
    assert len(stage.asks(Claim)) == 1


def test_a_worker_that_does_not_come_back_is_waited_for_until_the_deadline(stage):
    wait_for_the_pool(stage, timeout=2.0)
    for _ in range(4):
        stage.run(0.6)
        stage.peer_says(welcome_of(pools=("earlier",)))
    assert outcome(stage).code == ErrorCode.DEADLINE


def test_a_grant_of_a_younger_pool_waits_until_the_peer_has_told_of_it(stage):
    stage.pull()
    stage.peer_says(welcome_of())
    stage.peer_says(Grant(1, 7, 2, 5))
    assert ("read", 1) not in stage.commands
    stage.peer_says(welcome_of(epoch=2))
    assert ("read", 1) in stage.commands


def two_ranks():
    """A ticket of an engine of two ranks, each beside a daemon of its own."""
    spans = (Span(0, 0, ids(0, 1)),)
    ranks = [TicketRank(name, f"tcp://{name}:1", 0, name, "o", 0, SECRET) for name in ("a", "b")]
    return join(Ticket(4, (rank,), (spans,)).encode() for rank in ranks)


def half_welcome(name, rank, epoch=1, incarnation=5):
    half = make_cache("flash-hnd", rank, 2, num_blocks=8, block_tokens=2, groups=1)
    info = PoolInfo(name, epoch, bytes(8), half.spec.pool_bytes, half.raw)
    return Welcome(name, incarnation, f"{name}#{incarnation}", b"m", (info,))


def test_a_pull_of_two_producers_is_done_when_both_have_held(stage):
    stage.pull(ticket=two_ranks())
    stage.peer_says(half_welcome("a", 0), link=1)
    stage.peer_says(half_welcome("b", 1), link=2)
    for link in (1, 2):
        stage.peer_says(Grant(link, 7, 1, 5), link=link)
        stage.landed(link)
    stage.peer_says(Held(1), link=1)
    assert stage.notified == []
    stage.peer_says(Held(2), link=2)
    assert outcome(stage) == Done("p")


def test_a_producer_that_has_another_layout_since_it_was_met_is_asked_again(stage):
    stage.pull("first", ticket=make_ticket(address="tcp://a:1", pool="a", daemon="a"))
    whole = PoolInfo("a", 1, bytes(8), CACHE.spec.pool_bytes, CACHE.raw)
    stage.peer_says(Welcome("a", 5, "a#5", b"m", (whole,)))
    stage.pull("second", blocks=(4, 5), ticket=two_ranks())
    stage.peer_says(half_welcome("b", 1), link=2)
    assert stage.notified == []
    for link, name in enumerate("ab", 1):
        stage.peer_says(half_welcome(name, link - 1, epoch=3 - link), link)
    assert [claim.pool for claim in stage.asks(Claim)] == ["a", "a", "b"]


def test_a_producer_that_is_lost_before_the_other_is_there_fails_the_pull(stage):
    stage.pull(ticket=two_ranks(), timeout=60.0)
    stage.peer_says(half_welcome("a", 0), link=1)
    stage.run(4.1)  # a is silent from here on, b was all the time
    assert outcome(stage).code == ErrorCode.PEER_LOST
    stage.peer_says(half_welcome("b", 1), link=2)


def test_a_producer_that_restarts_before_the_other_is_there_is_waited_for(stage):
    stage.pull(ticket=two_ranks(), timeout=60.0)
    stage.peer_says(half_welcome("a", 0), link=1)
    stage.pongs(6)
    stage.peer_says(half_welcome("b", 1), link=2)
    assert stage.notified == []
    assert stage.asks(Claim) == []
    stage.peer_says(half_welcome("a", 0, incarnation=6), link=1)
    assert len(stage.asks(Claim)) == 2


def test_a_producer_that_has_done_its_part_may_go(stage):
    stage.pull(ticket=two_ranks(), timeout=60.0)
    stage.peer_says(half_welcome("a", 0), link=1)
    stage.peer_says(half_welcome("b", 1), link=2)
    stage.peer_says(Grant(1, 7, 1, 5), link=1)
    stage.landed(1)
    stage.peer_says(Held(1), link=1)
    stage.pongs(6)
    stage.peer_says(Grant(2, 8, 2, 5), link=2)
    stage.peer_says(half_welcome("b", 1, epoch=2), link=2)
    stage.landed(2)
    stage.peer_says(Held(2), link=2)
    assert outcome(stage) == Done("p")


def test_the_first_that_fails_stops_the_others(stage):
    stage.pull(ticket=two_ranks())
    stage.peer_says(half_welcome("a", 0), link=1)
    stage.peer_says(half_welcome("b", 1), link=2)
    for link in (1, 2):
        stage.peer_says(Grant(link, 7, 1, 5), link=link)
    stage.read_failed(1)
    failed = outcome(stage)
    assert (failed.code, failed.quarantined) == (ErrorCode.TRANSPORT, True)
    assert ("abort", 2) in stage.commands
    stage.landed(2)
    assert stage.notified[-1] == Freed("p")


def test_a_grant_of_another_run_than_was_greeted_is_not_used_until_that_has_been_greeted(stage):
    stage.pull()
    stage.peer_says(welcome_of())
    hellos = len(stage.asks(Hello))
    stage.peer_says(Grant(1, 7, 1, 6))
    assert ("read", 1) not in stage.commands
    assert len(stage.asks(Hello)) == hellos + 1
    stage.peer_says(welcome_of(incarnation=6))
    assert outcome(stage).code == ErrorCode.PEER_LOST
