import pytest
from structlog.testing import capture_logs

from kvd.actors.runtime.actor import call
from kvd.errors import ErrorCode
from kvd.protocol.peer import (
    Broken,
    Claim,
    Fence,
    Grant,
    Held,
    Pong,
    Refuse,
    Release,
    Renew,
    Settle,
    Settled,
)
from kvd.protocol.ticket import Ticket, TicketRank, proof, stamp
from kvd.protocol.types import Span
from kvd.protocol.worker import Cancel, Cancelled, Done, Failed, Freed
from kvd.transport.interface import Landed, ReadFailed
from tests.actors.scheduler.pulling import outcome, start_reading
from tests.actors.stage import PEER_STAMPS, SECRET, Stage, ids, welcome_of

WORD = 3
CONTENT = proof(SECRET, "there", "o", 4, (Span(0, 0, ids(0, 1)),))
STAMP = stamp(SECRET, 9, CONTENT, epoch=1)


def known_ticket(epoch=1, generation=9, word=WORD, incarnation=5, blocks=(0, 1)):
    rank = TicketRank("peer", "tcp://peer:1", incarnation, "there", "o", 0, SECRET, generation, epoch, word)
    return Ticket(4, (rank,), ((Span(0, 0, ids(*blocks)),),)).encode()


def read_once(stage, same_host=True):
    stage.same_host = same_host
    start_reading(stage)
    stage.transport_says(Landed(1, 0.01))
    stage.peer_says(Held(1))


def read_at_once(stage, **named):
    """A pull of a peer of the same host, whose lease the ticket names."""
    read_once(stage)
    stage.pull("q", ticket=known_ticket(**named))
    assert ("read", 2) in stage.commands
    assert len(stage.asks(Claim)) == 1


def test_a_lease_that_the_ticket_names_is_not_claimed_first_and_its_stamp_is_read(stage):
    read_at_once(stage)
    assert [read.stamp for read in stage.reads] == [0, PEER_STAMPS + 16 * (WORD - 1)]


def test_a_read_without_a_grant_moves_nothing_unless_the_stamp_is_there(stage):
    read_at_once(stage)
    assert [read.expected for read in stage.reads] == [0, STAMP]


def unproven(stage, read):
    """No stamp is found before the first byte."""
    stage.transport_says(ReadFailed(read, "no stamp", unproven=True))


def test_a_lease_whose_stamp_is_not_found_is_claimed_and_read_once_it_is_granted(stage):
    read_at_once(stage)
    unproven(stage, 2)
    assert [claim.claim for claim in stage.asks(Claim)] == [1, 2]
    stage.peer_says(Grant(2, 9, 1, 5))
    assert [read.expected for read in stage.reads] == [0, STAMP, 0]
    stage.transport_says(Landed(2, 0.01, stamp=STAMP))
    assert stage.notified == [Done("p"), Done("q")]


def test_a_claim_that_was_granted_while_nobody_knew_that_the_stamp_is_not_there_is_asked_for_again(stage):
    read_at_once(stage)
    stage.run(0.1)
    stage.peer_says(Grant(2, 9, 1, 5))
    unproven(stage, 2)
    assert [claim.claim for claim in stage.asks(Claim)] == [1, 2, 2]
    stage.peer_says(Grant(2, 9, 1, 5))
    assert len(stage.reads) == 3


@pytest.mark.parametrize("code", [ErrorCode.OFFER_GONE, ErrorCode.BAD_TICKET])
def test_who_pulls_with_tickets_that_nobody_knows_is_counted_and_named_once(stage, code):
    read_at_once(stage)
    stage.transport_says(Landed(2, 0.01, stamp=STAMP))
    with capture_logs() as logs:
        for transfer in (3, 4):
            stage.pull(f"made up {transfer}", ticket=known_ticket())
            unproven(stage, transfer)
            stage.peer_says(Refuse(transfer, code, "no such lease"))
    assert [(item.code, item.quarantined) for item in stage.notified[2:]] == [(code, False)] * 2
    assert stage.context.metrics.tickets_refused.labels(code)._value.get() == 2
    assert logs == [
        {
            "event": "ticket refused",
            "log_level": "warning",
            "worker": "w",
            "producer": "peer",
            "pool": "there",
            "code": code,
            "text": "no such lease",
        }
    ]


def test_a_pull_that_is_cancelled_before_the_stamp_was_looked_for_claims_nothing(stage):
    read_at_once(stage)
    stage.request(Cancel(9, "q"))
    unproven(stage, 2)
    assert len(stage.asks(Claim)) == 1
    assert stage.notified[1:] == [Cancelled("q", quarantined=True), Freed("q")]


@pytest.mark.parametrize(
    "end",
    [
        Landed(2, 0.01, stamp=STAMP),
        Landed(2, 0.01),
        ReadFailed(2, "given up"),
        ReadFailed(2, "no stamp", unproven=True),
    ],
    ids=["stamped", "landed", "broke", "unproven"],
)
def test_the_producer_hears_of_a_cancelled_read_that_needed_no_claim_until_it_has_answered(stage, end):
    read_at_once(stage)
    stage.request(Cancel(9, "q"))
    stage.run(0.1)
    assert stage.asks(Settle) == []
    stage.transport_says(end)
    assert stage.notified[1:] == [Cancelled("q", quarantined=True), Freed("q")]
    stage.run(0.1)
    [settle] = stage.asks(Settle)
    [fence] = settle.fences
    assert (fence.claim, fence.generation, fence.unclaimed.offer, fence.unclaimed.consumer) == (2, 0, "o", "q")
    stage.run(0.6)
    assert stage.asks(Settle) == [settle, settle]
    stage.peer_says(Settled((2,)))
    stage.run(1.2)
    assert stage.asks(Settle) == [settle, settle]
    assert stage.asks(Claim)[1:] == stage.asks(Release) == []
    assert len(stage.actors.scheduler.transfers) == 0


def test_a_producer_that_never_answers_is_no_longer_told_of_a_cancelled_read():
    stage = Stage(claim_ttl=3.0, retry=0.5, tombstone=2.0)
    stage.attach()
    read_at_once(stage)
    stage.request(Cancel(9, "q"))
    stage.read_failed(2)
    for _ in range(3):
        stage.pongs(5)
    assert len(stage.actors.scheduler.transfers) == 0


def test_a_read_that_fails_says_nothing_of_its_reader_which_may_come_again(stage):
    read_at_once(stage)
    stage.read_failed(2)
    stage.run(1.0)
    assert isinstance(stage.notified[-1], Failed)
    assert stage.asks(Settle) == []


def test_a_stamp_that_was_found_after_the_last_byte_is_the_proof(stage):
    read_at_once(stage)
    stage.transport_says(Landed(2, 0.01, stamp=STAMP))
    assert stage.notified == [Done("p"), Done("q")]


def test_the_producer_hears_of_proven_reads_later_and_of_many_at_once(stage):
    read_at_once(stage)
    stage.transport_says(Landed(2, 0.01, stamp=STAMP))
    stage.pull("r", blocks=(4, 5), ticket=known_ticket())
    stage.transport_says(Landed(3, 0.01, stamp=STAMP))
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
    stage.transport_says(Landed(2, 0.01, stamp=STAMP))
    stage.run(1.2)
    assert [fence.claim for fence in stage.asks(Fence)] == [1, 2, 2]
    stage.peer_says(Broken((2,), "offer_gone", "ended"))
    stage.run(1.2)
    assert len(stage.asks(Fence)) == 3
    assert stage.notified == [Done("p"), Done("q")]


def test_a_producer_that_never_answers_is_not_told_for_ever(stage):
    read_at_once(stage)
    stage.transport_says(Landed(2, 0.01, stamp=STAMP))
    for second in range(70):
        stage.peer_says(Pong(second, 5))
        stage.run(1.0)
    told = len(stage.asks(Fence))
    assert told > 100
    stage.peer_says(Pong(99, 5))
    stage.run(2.0)
    assert len(stage.asks(Fence)) == told
    call(stage.actors.scheduler.drain)
    stage.run()
    assert "scheduler" in stage.idle


def test_a_drained_daemon_waits_until_producers_know_of_its_reads(stage):
    read_at_once(stage)
    call(stage.actors.scheduler.drain)
    stage.transport_says(Landed(2, 0.01, stamp=STAMP))
    assert stage.idle == []
    stage.run(0.1)
    stage.peer_says(Settled((2,)))
    assert stage.idle == ["scheduler"]


@pytest.mark.parametrize(
    "found",
    [
        0,
        stamp(SECRET, 10, CONTENT, 1),
        stamp(SECRET, 9, bytes(16), 1),
        stamp(bytes(16), 9, CONTENT, 1),
        stamp(SECRET, 9, CONTENT, 2),
    ],
    ids=["wiped", "another lease", "other blocks", "another secret", "another pool"],
)
def test_whatever_else_was_found_proves_nothing_and_a_message_decides(stage, found):
    read_at_once(stage)
    stage.transport_says(Landed(2, 0.01, found))
    assert stage.notified == [Done("p")]
    fence = stage.asks(Fence)[-1]
    assert (fence.claim, fence.generation, fence.unclaimed.offer) == (2, 9, "o")
    stage.peer_says(Broken((2,), "lease_broken", "gone"))
    assert stage.notified[1:] == [Failed("q", "lease_broken", "gone", quarantined=False)]


def test_a_lease_without_a_stamp_is_claimed_before_it_is_read_and_fenced_by_message(stage):
    read_once(stage)
    stage.pull("q", ticket=known_ticket(word=0))
    assert [claim.claim for claim in stage.asks(Claim)] == [1, 2]
    assert len(stage.reads) == 1
    stage.peer_says(Grant(2, 9, 1, 5))
    assert [read.stamp for read in stage.reads] == [0, 0]
    stage.landed(2)
    assert stage.asks(Fence)[-1] == Fence(2, 9)
    stage.peer_says(Held(2))
    assert stage.notified == [Done("p"), Done("q")]


def test_a_lease_whose_stamp_cannot_be_read_is_claimed_before_it_is_read(stage):
    stage.stamps_readable = False
    read_once(stage)
    stage.pull("q", ticket=known_ticket())
    assert len(stage.asks(Claim)) == 2
    assert len(stage.reads) == 1


def test_of_reads_that_began_together_those_that_last_are_claimed(stage):
    read_at_once(stage)
    stage.pull("r", blocks=(4, 5), ticket=known_ticket())
    stage.pull("s", blocks=(6, 7), ticket=known_ticket())
    stage.transport_says(Landed(3, 0.01, stamp=STAMP))
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


def test_a_claim_that_is_granted_while_its_read_ends_early_is_released_once_before_or_when_that_is_over(stage):
    read_at_once(stage)
    stage.run(0.1)
    stage.request(Cancel(9, "q"))
    assert ("abort", 2) in stage.commands
    stage.run(0.6)
    assert [claim.claim for claim in stage.asks(Claim)] == [1, 2, 2]
    stage.peer_says(Grant(2, 9, 1, 5))
    stage.run(1.2)
    assert [claim.claim for claim in stage.asks(Claim)] == [1, 2, 2]
    assert Renew((2,)) not in stage.asks(Renew)
    assert [release.claim for release in stage.asks(Release)] == [2]
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


def test_a_lease_of_another_run_than_was_greeted_is_claimed_before_it_is_read(stage):
    read_once(stage)
    stage.pull("q", ticket=known_ticket(incarnation=4))
    assert [(claim.incarnation, claim.generation) for claim in stage.asks(Claim)[1:]] == [(4, 9)]


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


def test_a_read_that_the_peers_transport_serves_is_claimed(stage):
    read_once(stage, same_host=False)
    stage.pull("q", ticket=known_ticket())
    assert len(stage.asks(Claim)) == 2
