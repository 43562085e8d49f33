"""Pulls of offers that grow: each part is read while the next one is computed."""

import pytest

from kvd import limits
from kvd.actors.gateway.admission import Rule
from kvd.errors import ErrorCode
from kvd.net.interface import WorkerFrame
from kvd.protocol import codec, ticket
from kvd.protocol.peer import Broken, Claim, Fence, Follow, Grant, Grown, Held, Release, Settle
from kvd.protocol.ticket import Ticket, TicketRank
from kvd.protocol.types import Span
from kvd.protocol.worker import Cancel, Cancelled, Done, Failed, Freed, Pull
from kvd.transport.interface import Landed
from tests.actors.scheduler.pulling import outcome
from tests.actors.stage import CACHE, PEER_STAMPS, SECRET, Stage, ids, welcome_of

GENERATION = 7
BLOCK_OF = {int(byte): block for block, places in enumerate(CACHE.offsets[0]) for byte in places.ravel()}


def growing_ticket(offer="o"):
    rank = TicketRank("peer", "tcp://peer:1", 0, "there", offer, 0, SECRET)
    return Ticket(0, (rank,), ((),), grows=True).encode()


def whole(tokens, *blocks):
    return ticket.proof(SECRET, "there", "o", tokens, (Span(0, 0, ids(*blocks)),))


def follow(stage, blocks=(4, 5, 6)):
    """A pull of three blocks, six tokens, of which nothing has been offered yet."""
    assert stage.pull(ticket=growing_ticket(), blocks=blocks) == []
    stage.peer_says(welcome_of())
    stage.peer_says(Grant(1, GENERATION, 1, 5))


def grown(stage, seen, tokens, first, *blocks, parts=None, closed=False, stamp=0):
    told = (Span(0, first, ids(*blocks)),) if blocks else ()
    stage.peer_says(Grown(1, seen, seen + 1 if parts is None else parts, tokens, told, closed, stamp))


def moved(stage):
    """The blocks that the last read brings: from which, to which."""
    return sorted(
        {
            (BLOCK_OF[src + byte], BLOCK_OF[dst + byte])
            for src, dst, length in stage.reads[-1].descriptors.copies
            for byte in range(length)
        }
    )


def asked(stage):
    return [message.seen for message in stage.asks(Follow)]


def test_a_pull_may_be_claimed_before_a_block_is_known_and_then_asks_for_more(stage):
    follow(stage)
    [claim] = stage.asks(Claim)
    assert (claim.generation, claim.proof) == (0, ticket.proof(SECRET, "there", "o", 0, ()))
    assert asked(stage) == [0]
    assert stage.reads == []


def test_what_has_come_is_read_and_then_more_is_asked_for(stage):
    follow(stage)
    grown(stage, 0, 4, 0, 0, 3)
    assert moved(stage) == [(0, 4), (3, 5)]
    assert asked(stage) == [0]
    stage.landed(1)
    assert asked(stage) == [0, 1]
    grown(stage, 1, 6, 2, 1, closed=True)
    assert moved(stage) == [(1, 6)]
    assert stage.asks(Fence) == []
    stage.landed(1)
    [fence] = stage.asks(Fence)
    assert (fence.generation, fence.unclaimed, fence.proof) == (GENERATION, None, whole(6, 0, 3, 1))
    assert stage.notified == []
    stage.peer_says(Held(1))
    assert outcome(stage) == Done("p")


def test_a_block_that_may_still_be_written_to_is_read_only_when_it_is_full_or_the_offer_closed(stage):
    follow(stage)
    grown(stage, 0, 3, 0, 0, 3)
    assert moved(stage) == [(0, 4)]
    stage.landed(1)
    grown(stage, 1, 5, 2, 1)
    assert moved(stage) == [(3, 5)]
    stage.landed(1)
    grown(stage, 2, 5, 3, closed=True)
    assert moved(stage) == [(1, 6)]


def test_an_extension_without_a_full_block_is_noted_and_more_is_asked_for(stage):
    follow(stage)
    grown(stage, 0, 1, 0, 0)
    assert stage.reads == []
    assert asked(stage) == [0, 1]
    grown(stage, 1, 6, 1, 3, 1, parts=4, closed=True)
    assert moved(stage) == [(0, 4), (1, 6), (3, 5)]


def test_only_the_positions_that_are_wanted_are_read_and_all_that_is_known_is_proven(stage):
    assert stage.pull(ticket=growing_ticket(), blocks=()) == []
    stage.peer_says(welcome_of())
    stage.peer_says(Grant(1, GENERATION, 1, 5))
    grown(stage, 0, 4, 0, 0, 3)
    grown(stage, 1, 6, 2, 1, closed=True)
    assert stage.reads == []
    assert [fence.proof for fence in stage.asks(Fence)] == [whole(6, 0, 3, 1)]


def test_what_is_told_twice_or_late_is_dropped(stage):
    follow(stage)
    grown(stage, 0, 4, 0, 0, 3)
    grown(stage, 0, 6, 0, 0, 3, 1, closed=True)
    assert len(stage.reads) == 1
    stage.landed(1)
    grown(stage, 0, 4, 0, 0, 3)
    assert len(stage.reads) == 1
    assert asked(stage) == [0, 1]


def test_a_question_that_is_not_answered_is_asked_again(stage):
    follow(stage)
    stage.run(0.6)
    assert asked(stage) == [0, 0]


@pytest.mark.parametrize("closed", [False, True])
def test_what_does_not_go_on_where_it_ended_fails_the_pull(stage, closed):
    follow(stage)
    grown(stage, 0, 4, 0, 0, 3)
    stage.landed(1)
    grown(stage, 1, 6, 1, 1, closed=closed)
    failed = outcome(stage)
    assert (type(failed), failed.code, failed.quarantined) == (Failed, ErrorCode.BAD_BLOCKS, False)
    assert stage.asks(Release)


LIES = {
    "no blocks": (4, (), 1),
    "too few": (5, (0, 3), 1),
    "nothing new": (0, (), 0),
}


@pytest.mark.parametrize(("tokens", "told", "parts"), LIES.values(), ids=LIES)
def test_no_byte_counts_as_read_of_which_no_block_is_known(stage, tokens, told, parts):
    """Or a pull would be done with what its blocks held before: another conversation's, as a rule."""
    follow(stage)
    grown(stage, 0, tokens, 0, *told, parts=parts)
    grown(stage, 1, 6, 0, 0, 3, 1, closed=True)
    failed = outcome(stage)
    assert (type(failed), failed.code) == (Failed, ErrorCode.BAD_BLOCKS)
    assert stage.reads == []


@pytest.mark.parametrize("parts", [0, 1, limits.MAX_PARTS_TOLD + 1])
def test_a_producer_that_tells_nothing_or_of_too_many_parts_fails_the_pull_or_it_would_be_asked_for_ever(stage, parts):
    follow(stage)
    grown(stage, 0, 4, 0, 0, 3)
    stage.landed(1)
    grown(stage, 1, 4, 2, parts=parts)
    assert outcome(stage).code == (ErrorCode.TOO_LARGE if parts > 1 else ErrorCode.BAD_BLOCKS)
    assert asked(stage) == [0, 1]


def test_an_offer_of_as_many_parts_as_a_producer_takes_is_read_to_the_end(stage):
    follow(stage)
    grown(stage, 0, 4, 0, 0, 3, parts=limits.MAX_PARTS_PER_OFFER)
    stage.landed(1)
    grown(stage, limits.MAX_PARTS_PER_OFFER, 6, 2, 1, parts=limits.MAX_PARTS_TOLD, closed=True)
    stage.landed(1)
    stage.peer_says(Held(1))
    assert outcome(stage) == Done("p")


def test_an_offer_that_is_closed_before_all_that_is_wanted_fails_the_pull(stage):
    follow(stage)
    grown(stage, 0, 4, 0, 0, 3, closed=True)
    assert outcome(stage).code == ErrorCode.BAD_BLOCKS


def test_a_lease_that_breaks_between_two_reads_fails_the_pull_with_nothing_in_quarantine(stage):
    follow(stage)
    grown(stage, 0, 4, 0, 0, 3)
    stage.landed(1)
    stage.peer_says(Broken((1,), ErrorCode.LEASE_BROKEN, "withdrawn"))
    failed = outcome(stage)
    assert (failed.code, failed.quarantined) == (ErrorCode.LEASE_BROKEN, False)
    assert stage.pull("again", (4, 5, 6), ticket=growing_ticket("again")) == []


def test_a_lease_that_breaks_while_a_part_is_read_leaves_the_blocks_in_quarantine_until_that_has_ended(stage):
    follow(stage)
    grown(stage, 0, 4, 0, 0, 3)
    stage.peer_says(Broken((1,), ErrorCode.LEASE_BROKEN, "withdrawn"))
    failed = outcome(stage)
    assert (failed.code, failed.quarantined) == (ErrorCode.LEASE_BROKEN, True)
    stage.landed(1)
    assert stage.notified[-1] == Freed("p")
    assert asked(stage) == [0]


def test_a_pull_that_waits_for_more_is_cancelled_at_once(stage):
    follow(stage)
    stage.request(Cancel(9, "p"))
    assert outcome(stage) == Cancelled("p", quarantined=False)
    assert stage.asks(Release) == [Release(1, finished=True)]


def test_a_pull_that_is_cancelled_while_a_part_is_read_lets_go_of_its_claim_when_that_has_ended(stage):
    follow(stage)
    grown(stage, 0, 4, 0, 0, 3)
    stage.request(Cancel(9, "p"))
    assert outcome(stage) == Cancelled("p", quarantined=True)
    assert stage.asks(Release) == []
    stage.landed(1)
    assert stage.notified[-1] == Freed("p")
    assert stage.asks(Release) == [Release(1, finished=True)]
    assert asked(stage) == [0]


def test_a_hold_of_an_offer_that_grows_follows_nothing(stage):
    stage.request(Pull(2, "p", growing_ticket(), (), 5.0, hold=True))
    stage.peer_says(welcome_of())
    stage.peer_says(Grant(1, GENERATION, 1, 5))
    assert (asked(stage), stage.notified) == ([], [])
    stage.request(Cancel(9, "p"))
    assert stage.asks(Release) == [Release(1, finished=True)]


def test_a_stamp_over_the_whole_proves_the_last_read_without_a_message(stage):
    stage.same_host = True
    follow(stage)
    grown(stage, 0, 4, 0, 0, 3)
    assert stage.reads[-1].stamp == 0
    stage.landed(1)
    grown(stage, 1, 6, 2, 1, closed=True, stamp=3)
    read = stage.reads[-1]
    assert (read.stamp, read.expected) == (PEER_STAMPS + 2 * 16, 0)
    stage.transport_says(Landed(1, 0.01, ticket.stamp(SECRET, GENERATION, whole(6, 0, 3, 1), 1)))
    assert outcome(stage) == Done("p")
    assert stage.asks(Fence) == []
    stage.run(0.1)
    [settle] = stage.asks(Settle)
    assert settle.fences == (Fence(1, GENERATION, proof=whole(6, 0, 3, 1)),)


def test_another_stamp_is_no_proof_and_the_producer_is_asked(stage):
    stage.same_host = True
    follow(stage)
    grown(stage, 0, 6, 0, 0, 3, 1, closed=True, stamp=3)
    stage.transport_says(Landed(1, 0.01, ticket.stamp(SECRET, GENERATION, whole(4, 0, 3), 1)))
    assert stage.notified == []
    assert len(stage.asks(Fence)) == 1


def test_a_user_who_pulls_what_is_never_offered_is_refused_before_the_producer_has_no_room_for_others(
    stage, monkeypatch
):
    monkeypatch.setattr(limits, "MAX_CLAIMS_AHEAD", 2)
    for number in range(3):
        stage.pull(f"p{number}", (number,), ticket=growing_ticket(f"o{number}"))
    stage.peer_says(welcome_of())
    refused = outcome(stage)
    assert (refused.request, refused.code) == ("p2", ErrorCode.OVERLOADED)
    assert "2 claims of this user wait for offers at tcp://peer:1" in refused.text
    stage.peer_says(Grant(1, GENERATION, 1, 5))
    assert stage.pull("later", (4,), ticket=growing_ticket("later")) == []
    assert len(stage.asks(Claim)) == 3


def test_a_user_who_holds_many_offers_is_refused_before_the_producer_has_no_room_for_others(monkeypatch):
    monkeypatch.setattr(limits, "MAX_CLAIMS_PER_USER", 2)
    stage = Stage(rules=(Rule(pools=("*",), uid=2000),))
    stage.attach()
    stage.attach("other", 2, pid=2, uid=2000)
    for number in range(3):
        stage.pull(f"p{number}", (number,), ticket=growing_ticket(f"o{number}"))
        if not number:
            stage.peer_says(welcome_of())
        stage.peer_says(Grant(number + 1, GENERATION, 1, 5))
    refused = outcome(stage)
    assert (refused.request, refused.code) == ("p2", ErrorCode.OVERLOADED)
    assert "2 reads of this user from tcp://peer:1 have not ended" in refused.text
    pull = Pull(1, "q", growing_ticket("q"), (Span(0, 0, ids(0)),), 5.0)
    stage.actors.gateway.received(WorkerFrame(b"\2" * 16, codec.encode(pull), 2000))
    stage.run()
    assert len(stage.asks(Claim)) == 3
    stage.request(Cancel(3, "p0"))
    assert stage.pull("later", (4,), ticket=growing_ticket("later")) == []
    assert len(stage.asks(Claim)) == 4


def test_what_a_producer_tells_counts_as_a_part_of_the_ticket_until_the_pull_has_ended(stage, monkeypatch):
    opened = stage.actors.scheduler._targets._open
    follow(stage)
    [(pulls, ranks, before)] = opened.values()
    monkeypatch.setattr(limits, "MAX_TICKET_BYTES_PER_WORKER", before + 8)
    grown(stage, 0, 4, 0, 0, 3)
    assert list(opened.values()) == [(pulls, ranks, before + 8)]
    stage.landed(1)
    grown(stage, 1, 6, 2, 1)
    failed = outcome(stage)
    assert failed.code == ErrorCode.OVERLOADED
    assert f"{before + 12} bytes of tickets" in failed.text
    assert not opened


def test_a_plan_of_what_has_come_gets_only_what_is_not_read_and_the_last_one_all(stage):
    """Or each of thousands of little parts would have all blocks before it copied and checked again."""
    follow(stage)
    transfer = stage.actors.scheduler.transfers._open[1]
    grown(stage, 0, 4, 0, 0, 3)
    assert transfer.told.spans == (Span(0, 0, ids(0, 3)),)
    stage.landed(1)
    grown(stage, 1, 5, 2, 1, 7)
    assert transfer.told.spans == (Span(0, 2, ids(1)),)
    grown(stage, 2, 8, 4, closed=True)
    assert transfer.told.spans == (Span(0, 0, ids(0, 3, 1, 7)),)
    assert moved(stage) == [(1, 6)]


def test_half_a_block_id_fails_the_pull(stage):
    follow(stage)
    stage.peer_says(Grown(1, 0, 1, 2, (Span(0, 0, ids(0) + bytes(2)),), closed=False))
    assert (outcome(stage).code, "6 bytes of block ids" in outcome(stage).text) == (ErrorCode.BAD_BLOCKS, True)
