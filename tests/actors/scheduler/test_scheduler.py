import gc

import pytest

from kvd import limits
from kvd.actors.runtime.messages import Drain, Stop
from kvd.errors import ErrorCode
from kvd.protocol.peer import (
    Broken,
    Claim,
    Fence,
    Grant,
    Held,
    Hello,
    Pong,
    PoolInfo,
    Refuse,
    Release,
    Renew,
    Settle,
    Settled,
    Welcome,
)
from kvd.protocol.ticket import Ticket, TicketRank, join, proof, stamp
from kvd.protocol.types import Span
from kvd.protocol.worker import Cancel, Cancelled, Done, Error, Failed, Freed, Pull
from kvd.transport.interface import Landed
from tests.actors.stage import CACHE, PEER_STAMPS, SECRET, Stage, ids, make_ticket, welcome_of
from tests.simulator.virtual.cache import make_cache


@pytest.fixture
def stage():
    stage = Stage(claim_ttl=3.0, retry=0.5)
    stage.attach()
    return stage


def outcome(stage):
    [item] = stage.notified
    return item


def start_reading(stage, **pull):
    assert stage.pull(**pull) == []
    stage.peer_says(welcome_of())
    stage.peer_says(Grant(1, 7, 1, 5))
    assert ("read", 1) in stage.commands


def test_a_pull_claims_reads_fences_and_is_done(stage):
    start_reading(stage)
    assert stage.asks(Fence) == []
    stage.landed(1)
    assert stage.asks(Fence) == [Fence(1, 7)]
    assert stage.notified == []
    stage.peer_says(Held(1))
    assert outcome(stage) == Done("p")


def test_pulls_whose_time_is_over_at_one_moment_fill_no_mailbox(stage, monkeypatch):
    for number in range(100):
        assert stage.pull(f"p{number}", blocks=(), timeout=2.0 - stage.loop.time()) == []
    monkeypatch.setattr(limits, "MAILBOX_MESSAGES", 30)
    monkeypatch.setattr(limits, "BATCH_ITEMS", 20)
    stage.run(3.0)
    assert [(item.request, item.code) for item in stage.notified] == [(f"p{n}", "deadline") for n in range(100)]


def test_a_claim_names_what_the_ticket_names(stage):
    stage.pull(ticket=make_ticket(incarnation=5))
    stage.peer_says(welcome_of())
    [claim] = stage.asks(Claim)
    assert (claim.pool, claim.offer, claim.incarnation, claim.readers, claim.ttl) == ("there", "o", 5, 1, 3.0)


def test_a_fence_that_does_not_hold_fails_the_pull(stage):
    start_reading(stage)
    stage.landed(1)
    stage.peer_says(Broken((1,), "lease_broken", "gone"))
    assert outcome(stage) == Failed("p", "lease_broken", "gone", quarantined=False)


def test_a_held_that_nobody_asked_for_is_dropped(stage):
    start_reading(stage)
    stage.peer_says(Held(1))
    assert stage.notified == []


def test_answers_on_another_link_are_dropped(stage):
    stage.pull()
    stage.pull("q", blocks=(4, 5), ticket=make_ticket(address="tcp://other:1"))
    stage.peer_says(welcome_of())
    stage.peer_says(Grant(1, 7, 1, 5), link=2)
    assert ("read", 1) not in stage.commands


def test_a_claim_that_is_refused_fails_the_pull_with_the_producers_reason(stage):
    stage.pull()
    stage.peer_says(welcome_of())
    stage.peer_says(Refuse(1, "offer_gone", "it has ended"))
    assert outcome(stage) == Failed("p", "offer_gone", "it has ended", quarantined=False)


def test_only_the_worker_can_cancel(stage):
    stage.pull()
    stage.peer_says(welcome_of())
    stage.peer_says(Refuse(1, "cancelled", "says a peer"))
    assert isinstance(outcome(stage), Failed)


def test_a_pull_fails_at_its_deadline_and_its_blocks_stay_in_quarantine_until_the_read_has_ended(stage):
    start_reading(stage, timeout=2.0)
    stage.run(2.1)
    failed = outcome(stage)
    assert (failed.code, failed.quarantined) == (ErrorCode.DEADLINE, True)
    assert "reading" in failed.text
    assert ("abort", 1) in stage.commands
    [busy] = stage.pull("q", blocks=(3, 4))
    assert (type(busy), busy.code) == (Error, ErrorCode.BLOCKS_BUSY)
    stage.read_failed(1)
    assert stage.notified[-1] == Freed("p")
    assert stage.asks(Release) == [Release(1, finished=False)]
    assert stage.pull("q", blocks=(3, 4)) == []


def test_the_claim_is_renewed_as_long_as_the_read_is_open(stage):
    start_reading(stage, timeout=2.0)
    stage.run(2.1)  # failed by now
    stage.peer_says(Pong(1, 5))
    before = len(stage.asks(Renew))
    stage.run(2.0)
    assert len(stage.asks(Renew)) > before
    stage.landed(1)
    stage.run(2.0)
    last = len(stage.asks(Renew))
    stage.run(3.0)
    assert len(stage.asks(Renew)) == last


def test_a_claim_that_is_not_granted_is_asked_for_again_and_not_renewed(stage):
    stage.pull(timeout=60.0)
    stage.peer_says(welcome_of())
    stage.run(2.6)
    assert len(stage.asks(Claim)) == 6
    assert stage.asks(Renew) == []


def test_a_cancelled_pull_says_that_this_reader_will_not_come_again(stage):
    start_reading(stage)
    stage.request(Cancel(5, "p"))
    assert outcome(stage) == Cancelled("p", quarantined=True)
    stage.landed(1)
    assert stage.notified[-1] == Freed("p")
    assert stage.asks(Release) == [Release(1, finished=True)]


def test_a_request_id_is_used_once_at_a_time(stage):
    stage.pull()
    [error] = stage.pull(blocks=(4, 5), call=9)
    assert (error.call, error.code) == (9, ErrorCode.DUPLICATE_REQUEST)


def test_a_block_named_twice_is_refused(stage):
    assert stage.pull(blocks=(2, 2))[0].code == ErrorCode.BAD_BLOCKS


def test_too_many_pulls_are_refused(stage, monkeypatch):
    monkeypatch.setattr(limits, "MAX_REQUESTS_PER_WORKER", 1)
    stage.pull()
    assert stage.pull("q", blocks=(4, 5))[0].code == ErrorCode.OVERLOADED


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (make_ticket(raw_ids=b"\1"), ErrorCode.BAD_TICKET),
        (make_ticket(blocks=(0, 99)), ErrorCode.BAD_BLOCKS),
        (make_ticket(blocks=(0,)), ErrorCode.BAD_BLOCKS),
    ],
)
def test_a_ticket_that_makes_no_sense_fails_its_pull_and_nothing_else(stage, text, code):
    stage.pull(ticket=text)
    stage.peer_says(welcome_of())
    assert outcome(stage).code == code
    assert stage.pull("q") == []


def test_an_address_that_is_none_fails_the_pull(stage):
    stage.pull(ticket=make_ticket(address="nowhere"))
    assert outcome(stage).code == ErrorCode.PEER_LOST


def test_what_does_not_fit_fails_the_pull_with_both_sides_named(stage):
    other = make_cache("flash-hnd", 0, 2, num_blocks=8, block_tokens=2, groups=1)
    stage.pull()
    welcome = welcome_of()
    info = PoolInfo("there", 1, bytes(8), other.spec.pool_bytes, other.raw)
    stage.peer_says(Welcome("peer", 5, "peer#1", b"m", (info,), welcome.version))
    assert outcome(stage).code == ErrorCode.INCOMPATIBLE


def test_a_pull_of_nothing_is_fenced_all_the_same(stage):
    stage.pull(blocks=())
    stage.peer_says(welcome_of())
    stage.peer_says(Grant(1, 7, 1, 5))
    assert not any(command[0] == "read" for command in stage.commands)
    assert stage.asks(Fence) == [Fence(1, 7)]
    stage.peer_says(Held(1))
    assert outcome(stage) == Done("p")


# --- peers that change


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


# --- the end


def test_a_stopped_daemon_fails_its_pulls(stage):
    start_reading(stage)
    stage.context.scheduler.tell(Drain())
    stage.run()
    assert stage.pull("q", blocks=(4,))[0].code == ErrorCode.SHUTTING_DOWN
    stage.context.scheduler.tell(Stop())
    stage.run()
    assert outcome(stage).code == ErrorCode.SHUTTING_DOWN
    assert stage.idle == []
    stage.landed(1)
    assert stage.idle == ["scheduler"]


def test_too_much_quarantine_is_a_condition(stage):
    rough = Stage(max_quarantined=0)
    rough.attach()
    start_reading(rough, timeout=1.0)
    rough.run(1.1)
    assert "1 pulls are in quarantine" in rough.conditions["quarantine"]
    rough.landed(1)
    assert rough.conditions["quarantine"] is None


# --- reads of the same host

WORD = 3
CONTENT = proof(SECRET, "there", "o", 4, (Span(0, 0, ids(0, 1)),))
STAMP = stamp(SECRET, 9, CONTENT)


def known_ticket(epoch=1, generation=9, word=WORD, incarnation=5):
    rank = TicketRank("peer", "tcp://peer:1", incarnation, "there", "o", 0, SECRET, generation, epoch, word)
    return Ticket(4, (rank,), ((Span(0, 0, ids(0, 1)),),)).encode()


def read_once(stage, in_post=True):
    start_reading(stage)
    stage.transport_says(Landed(1, 0.01, in_post))
    stage.peer_says(Held(1))


def read_at_once(stage, **named):
    """A pull of a peer of the same host, whose lease the ticket names."""
    read_once(stage)
    stage.pull("q", ticket=known_ticket(**named))
    assert ("read", 2) in stage.commands
    assert len(stage.asks(Claim)) == 1


def test_a_lease_that_the_ticket_names_is_not_claimed_first_and_its_stamp_is_read(stage):
    read_at_once(stage)
    assert stage.stamps_asked_for == [0, PEER_STAMPS + 8 * (WORD - 1)]


def test_a_stamp_that_was_found_after_the_last_byte_is_the_proof(stage):
    read_at_once(stage)
    stage.transport_says(Landed(2, 0.01, in_post=True, stamp=STAMP))
    assert stage.notified == [Done("p"), Done("q")]


def test_the_producer_hears_of_proven_reads_later_and_of_many_at_once(stage):
    read_at_once(stage)
    stage.transport_says(Landed(2, 0.01, in_post=True, stamp=STAMP))
    stage.pull("r", blocks=(4, 5), ticket=known_ticket())
    stage.transport_says(Landed(3, 0.01, in_post=True, stamp=STAMP))
    assert stage.asks(Settle) == []
    stage.run(0.1)
    [settle] = stage.asks(Settle)
    assert [(fence.claim, fence.generation, fence.unclaimed.offer) for fence in settle.fences] == [
        (2, 9, "o"),
        (3, 9, "o"),
    ]
    stage.peer_says(Settled((2, 3)))
    stage.run(2.0)
    assert len(stage.asks(Settle)) + len(stage.asks(Fence)) == 2


def test_a_producer_that_does_not_answer_is_told_again_of_a_proven_read(stage):
    read_at_once(stage)
    stage.transport_says(Landed(2, 0.01, in_post=True, stamp=STAMP))
    stage.run(1.2)
    assert [fence.claim for fence in stage.asks(Fence)] == [1, 2, 2]
    stage.peer_says(Broken((2,), "offer_gone", "ended"))
    stage.run(1.2)
    assert len(stage.asks(Fence)) == 3
    assert stage.notified == [Done("p"), Done("q")]


def test_a_producer_that_never_answers_is_not_told_for_ever(stage):
    read_at_once(stage)
    stage.transport_says(Landed(2, 0.01, in_post=True, stamp=STAMP))
    for second in range(70):
        stage.peer_says(Pong(second, 5))
        stage.run(1.0)
    told = len(stage.asks(Fence))
    assert told > 100
    stage.peer_says(Pong(99, 5))
    stage.run(2.0)
    assert len(stage.asks(Fence)) == told
    stage.context.scheduler.tell(Drain())
    stage.run()
    assert "scheduler" in stage.idle


def test_a_drained_daemon_waits_until_producers_know_of_its_reads(stage):
    read_at_once(stage)
    stage.context.scheduler.tell(Drain())
    stage.transport_says(Landed(2, 0.01, in_post=True, stamp=STAMP))
    assert stage.idle == []
    stage.run(0.1)
    stage.peer_says(Settled((2,)))
    assert stage.idle == ["scheduler"]


@pytest.mark.parametrize(
    ("in_post", "found"),
    [
        (True, 0),
        (True, stamp(SECRET, 10, CONTENT)),
        (True, stamp(SECRET, 9, bytes(16))),
        (True, stamp(bytes(16), 9, CONTENT)),
        (False, STAMP),
    ],
    ids=["wiped", "another lease", "other blocks", "another secret", "read by the network"],
)
def test_whatever_else_was_found_proves_nothing_and_a_message_decides(stage, in_post, found):
    read_at_once(stage)
    stage.transport_says(Landed(2, 0.01, in_post, found))
    assert stage.notified == [Done("p")]
    fence = stage.asks(Fence)[-1]
    assert (fence.claim, fence.generation, fence.unclaimed.offer) == (2, 9, "o")
    stage.peer_says(Broken((2,), "lease_broken", "gone"))
    assert stage.notified[1:] == [Failed("q", "lease_broken", "gone", quarantined=False)]


def test_a_lease_without_a_stamp_is_fenced_by_message(stage):
    read_at_once(stage, word=0)
    assert stage.stamps_asked_for == [0, 0]
    stage.landed(2)
    assert stage.asks(Fence)[-1].unclaimed.incarnation == 5
    stage.peer_says(Held(2))
    assert stage.notified == [Done("p"), Done("q")]


def test_of_reads_that_began_together_those_that_last_are_claimed(stage):
    read_at_once(stage)
    stage.pull("r", blocks=(4, 5), ticket=known_ticket())
    stage.pull("s", blocks=(6, 7), ticket=known_ticket())
    stage.transport_says(Landed(3, 0.01, in_post=True, stamp=STAMP))
    stage.run(0.025)
    assert [claim.claim for claim in stage.asks(Claim)] == [1, 2, 4]


def test_a_read_that_lasts_is_claimed_and_renewed(stage):
    read_at_once(stage)
    stage.run(0.1)
    assert [claim.claim for claim in stage.asks(Claim)] == [1, 2]
    stage.peer_says(Grant(2, 9, 1, 5))
    stage.run(3.2)
    assert [claim.claim for claim in stage.asks(Claim)] == [1, 2]
    assert Renew((2,)) in stage.asks(Renew)
    stage.transport_says(Landed(2, 3.0))
    assert stage.asks(Fence)[-1] == Fence(2, 9)


def test_a_claim_that_is_granted_while_its_read_ends_early_is_renewed_until_that_is_over(stage):
    read_at_once(stage)
    stage.run(0.1)
    stage.request(Cancel(9, "q"))
    assert ("abort", 2) in stage.commands
    stage.run(0.6)
    assert [claim.claim for claim in stage.asks(Claim)] == [1, 2, 2]
    stage.peer_says(Grant(2, 9, 1, 5))
    stage.run(1.2)
    assert [claim.claim for claim in stage.asks(Claim)] == [1, 2, 2]
    assert Renew((2,)) in stage.asks(Renew)
    stage.read_failed(2)
    assert [release.claim for release in stage.asks(Release)] == [2]


def test_a_claim_that_is_refused_while_its_read_ends_early_is_not_asked_for_again(stage):
    read_at_once(stage)
    stage.run(0.1)
    stage.request(Cancel(9, "q"))
    stage.peer_says(Refuse(2, "offer_gone", "ended"))
    stage.run(2.0)
    assert [claim.claim for claim in stage.asks(Claim)] == [1, 2]


@pytest.mark.parametrize(("generation", "incarnation"), [(10, 5), (9, 6)], ids=["lease", "run"])
def test_a_grant_that_differs_from_the_ticket_is_not_believed(stage, generation, incarnation):
    stage.pull(ticket=known_ticket())
    stage.peer_says(welcome_of())
    stage.peer_says(Grant(1, generation, 1, incarnation))
    assert outcome(stage).code == ErrorCode.OFFER_GONE
    assert ("read", 1) not in stage.commands
    assert [release.claim for release in stage.asks(Release)] == [1]


def test_a_grant_of_another_run_than_was_greeted_is_not_used_until_that_has_been_greeted(stage):
    stage.pull()
    stage.peer_says(welcome_of())
    hellos = len(stage.asks(Hello))
    stage.peer_says(Grant(1, 7, 1, 6))
    assert ("read", 1) not in stage.commands
    assert len(stage.asks(Hello)) == hellos + 1
    stage.peer_says(welcome_of(incarnation=6))
    assert outcome(stage).code == ErrorCode.PEER_LOST


def test_a_lease_of_another_run_than_was_greeted_is_claimed_before_it_is_read(stage):
    read_once(stage)
    stage.pull("q", ticket=known_ticket(incarnation=4))
    assert [(claim.incarnation, claim.generation) for claim in stage.asks(Claim)[1:]] == [(4, 9)]


def test_a_claim_names_its_consumer_which_is_the_request_unless_the_worker_says_another(stage):
    stage.pull("p")
    stage.request(Pull(3, "q", make_ticket(), (Span(0, 0, ids(4, 5)),), 5.0, None, "engine 1, request 7"))
    stage.peer_says(welcome_of())
    assert [claim.consumer for claim in stage.asks(Claim)] == ["p", "engine 1, request 7"]


def test_a_claim_that_is_refused_while_its_read_runs_fails_the_pull(stage):
    read_at_once(stage)
    stage.run(0.1)
    stage.peer_says(Refuse(2, "offer_gone", "withdrawn"))
    assert stage.notified[1:] == [Failed("q", "offer_gone", "withdrawn", quarantined=True)]
    assert ("abort", 2) in stage.commands


@pytest.mark.parametrize("ticket", [known_ticket(generation=0), known_ticket(epoch=2)])
def test_a_lease_that_the_ticket_does_not_name_is_claimed(stage, ticket):
    read_once(stage)
    stage.pull("q", ticket=ticket)
    assert len(stage.asks(Claim)) == 2


def test_a_read_that_the_peers_transport_served_is_claimed(stage):
    read_once(stage, in_post=False)
    stage.pull("q", ticket=known_ticket())
    assert len(stage.asks(Claim)) == 2


def test_a_pull_that_is_refused_leaves_nothing_in_memory():
    stage = Stage()
    stage.attach()
    stage.pull("p")
    stage.pull("p")
    gc.collect()
    before = sum(issubclass(type(each), BaseException) for each in gc.get_objects())
    for _ in range(50):
        [refused] = stage.pull("p")
        assert refused.code == ErrorCode.DUPLICATE_REQUEST
    gc.collect()
    assert sum(issubclass(type(each), BaseException) for each in gc.get_objects()) == before
