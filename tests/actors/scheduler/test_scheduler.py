import gc

import pytest

from kvd import limits
from kvd.actors.runtime.actor import call
from kvd.errors import ErrorCode
from kvd.protocol.peer import (
    Broken,
    Claim,
    Fence,
    Grant,
    Held,
    PoolInfo,
    Refuse,
    Release,
    Renew,
    Settle,
    Welcome,
)
from kvd.protocol.types import Span
from kvd.protocol.worker import Cancel, Cancelled, Done, Error, Failed, Freed, Offered, Pull
from tests.actors.scheduler.pulling import outcome, start_reading
from tests.actors.stage import Stage, ids, make_ticket, welcome_of
from tests.simulator.virtual.cache import make_cache


def test_a_pull_claims_reads_fences_and_is_done(stage):
    start_reading(stage)
    assert stage.asks(Fence) == []
    stage.landed(1)
    assert stage.asks(Fence) == [Fence(1, 7)]
    assert stage.notified == []
    stage.peer_says(Held(1))
    assert outcome(stage) == Done("p")


def test_a_pool_that_waits_for_its_last_write_to_be_registered_anew_takes_no_pull(stage):
    start_reading(stage)
    call(stage.actors.pools.renew, "w")
    stage.run()
    [refused] = stage.pull("q", blocks=(4, 5), call=3)
    assert (refused.call, refused.code) == (3, ErrorCode.POOL_BUSY)
    assert "is being given back" in refused.text
    stage.landed(1)
    assert stage.pull("q", blocks=(4, 5), call=4) == []


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


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_read_that_hangs_after_its_pull_has_ended_keeps_its_own_blocks_and_lets_those_of_the_producer_go(
    stage, cancelled
):
    start_reading(stage, timeout=1.5)
    if cancelled:
        stage.request(Cancel(3, "p"))
    for _ in range(5):
        stage.pongs(5)
    assert outcome(stage).quarantined
    assert stage.asks(Release) == [Release(1, finished=cancelled)]
    renewed = len(stage.asks(Renew))
    for _ in range(5):
        stage.pongs(5)
    assert len(stage.asks(Renew)) == renewed
    assert stage.pull("q", call=4)[0].code == ErrorCode.BLOCKS_BUSY
    stage.read_failed(1)
    assert stage.notified[1:] == [Freed("p")]
    stage.run(0.1)
    assert len(stage.asks(Release)) == 1
    assert stage.asks(Settle) == []  # which would count its reader once more
    assert stage.pull("q", call=5) == []


def test_a_claim_that_is_not_answered_is_not_sent_again_once_its_read_hangs_without_a_pull(stage):
    stage.same_host = True
    stage.pull(ticket=make_ticket(incarnation=5), timeout=1.0)
    stage.peer_says(welcome_of())
    start = len(stage.asks(Claim))
    stage.peer_says(Grant(1, 7, 1, 5))
    stage.request(Cancel(3, "p"))
    for _ in range(5):
        stage.pongs(5)
    assert len(stage.asks(Claim)) == start
    assert len(stage.asks(Release)) == 1


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


def test_the_reason_of_a_producer_is_one_line_for_the_logs_of_daemon_and_engine(stage):
    stage.pull()
    stage.peer_says(welcome_of())
    stage.peer_says(Refuse(1, "offer_gone", "ended\n\x1b[2J\u2028INFO all is well"))
    assert outcome(stage) == Failed("p", "offer_gone", "ended??[2J?INFO all is well", quarantined=False)


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


def test_a_pull_that_is_late_says_that_the_daemon_had_no_processor_in_its_time(stage):
    stage.context.starved = lambda seconds: f"starved in the last {seconds:.0f} s"
    start_reading(stage, timeout=2.0)
    stage.run(2.1)
    assert outcome(stage).text == "not done after 2.000 s (it was reading); starved in the last 2 s"


def test_the_claim_is_renewed_as_long_as_the_pull_reads(stage):
    start_reading(stage, timeout=60.0)
    for _ in range(20):
        stage.pongs(5)
    before = len(stage.asks(Renew))
    assert before >= 18
    assert stage.asks(Release) == []
    stage.landed(1)
    stage.peer_says(Held(1))
    stage.run(3.0)
    assert len(stage.asks(Renew)) <= before + 1


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


def test_blocks_that_stand_in_an_offer_are_not_written_to_until_it_has_ended(stage):
    stage.offer(blocks=(2, 3))
    [error] = stage.pull(blocks=(3, 4))
    assert (error.code, error.text) == (
        ErrorCode.BLOCKS_BUSY,
        "block 3 of group 0 stands in an offer, which must be released first",
    )
    stage.request(Cancel(9, "o"))
    assert stage.pull(blocks=(3, 4)) == []


def test_blocks_that_a_pull_writes_to_are_not_offered_until_nothing_writes_to_them(stage):
    start_reading(stage)
    stage.request(Cancel(9, "p"))
    [error] = stage.offer(blocks=(1, 2))
    assert (type(error), error.code) == (Error, ErrorCode.BLOCKS_BUSY)
    assert "block 2 of group 0 belongs to a pull that has not ended or is in quarantine" in error.text
    stage.read_failed(1)
    [offered] = stage.offer(blocks=(1, 2))
    assert isinstance(offered, Offered)


def test_a_pool_that_quiesces_takes_no_pull_while_one_that_has_ended_may_still_write_to_it(stage):
    start_reading(stage)
    pool = stage.actors.scheduler._pulls["w", "p"].pool
    call(stage.actors.scheduler.quiesce, pool, "the worker is gone", force=False)
    stage.run()
    assert outcome(stage) == Cancelled("p", quarantined=True)
    [refused] = stage.pull("q", blocks=(4, 5))
    assert (refused.code, refused.text) == (ErrorCode.POOL_BUSY, "the pool 'w' is being given back")
    stage.read_failed(1)
    assert stage.actors.scheduler._targets.is_quiet(pool.id)
    [refused] = stage.pull("q", blocks=(4, 5))
    assert refused.code == ErrorCode.POOL_BUSY


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


def test_a_claim_names_its_consumer_which_is_the_request_unless_the_worker_says_another(stage):
    stage.pull("p")
    stage.request(Pull(3, "q", make_ticket(), (Span(0, 0, ids(4, 5)),), 5.0, None, "engine 1, request 7"))
    stage.peer_says(welcome_of())
    assert [claim.consumer for claim in stage.asks(Claim)] == ["p", "engine 1, request 7"]


def test_a_stopped_daemon_fails_its_pulls(stage):
    start_reading(stage)
    call(stage.actors.scheduler.drain)
    stage.run()
    assert stage.pull("q", blocks=(4,))[0].code == ErrorCode.SHUTTING_DOWN
    call(stage.actors.scheduler.stop)
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
