"""Offers that grow, as the producer's daemon keeps them."""

import re

import msgspec
import pytest

from kvd import limits
from kvd.actors.runtime.pace import RateLimit
from kvd.actors.runtime.pools import Hold
from kvd.errors import ErrorCode
from kvd.protocol import ticket
from kvd.protocol.peer import Broken, Fence, Follow, Grant, Grown, Held, Release
from kvd.protocol.types import Span, joined
from kvd.protocol.worker import Cancel, Error, Extend, Extended, Offer, Offered, Released
from tests.actors.batches import sizes_of
from tests.actors.stage import SECRET, Stage, ids, make_claim
from tests.simulator.virtual.cache import make_cache

HYBRID = make_cache("flash-hnd", 0, 1, num_blocks=8, block_tokens=2, groups=2)


def blocks(first, *numbers, group=0):
    return (Span(group, first, ids(*numbers)),)


def claim(number=1, **which):
    shown = ticket.proof(which.pop("secret", SECRET), "w", "o", 0, ())
    made = make_claim(number, **which)
    return type(made)(*(shown if field == "proof" else getattr(made, field) for field in made.__struct_fields__))


@pytest.fixture
def stage():
    stage = Stage(claim_wait=2.0, tombstone=10.0)
    stage.attach()
    return stage


def opened(stage, ttl=30.0):
    return stage.request(Offer(1, "o", 0, (), ttl, SECRET, grows=True))


def extend(stage, tokens, spans, *, closes=False, offer="o"):
    return stage.request(Extend(7, offer, tokens, spans, closes))


def refused(answers):
    (error,) = answers
    assert (type(error), error.call) == (Error, 7)
    return error.code, error.text


def whole(tokens, *spans):
    return ticket.proof(SECRET, "w", "o", tokens, spans)


def released(stage):
    return [(item.offer, item.reason) for item in stage.notified if isinstance(item, Released)]


def test_an_offer_is_opened_under_its_secret_and_its_ticket_names_no_blocks(stage):
    [offered] = opened(stage)
    assert isinstance(offered, Offered)
    made = ticket.decode(offered.ticket)
    assert (made.grows, made.tokens, made.blocks) == (True, 0, ((),))
    assert made.ranks[0].generation


def test_a_claim_may_wait_for_the_opening_and_is_granted_before_any_block_is_known(stage):
    assert stage.asked_by_peer(claim()) == []
    opened(stage)
    [(_, grant)] = stage.answers
    assert isinstance(grant, Grant)
    assert stage.asked_by_peer(claim(2, secret=bytes(16)))[0].code == ErrorCode.BAD_TICKET


def test_a_reader_that_asks_is_told_of_the_next_extension(stage):
    opened(stage)
    stage.asked_by_peer(claim())
    assert stage.asked_by_peer(Follow(1, 0)) == []
    assert extend(stage, 3, blocks(0, 0, 1)) == [Extended(7)]
    assert stage.answers[-1][1] == Grown(1, 0, 1, 3, blocks(0, 0, 1), closed=False)


def test_what_comes_before_a_reader_asks_again_is_told_together(stage):
    opened(stage)
    stage.asked_by_peer(claim())
    extend(stage, 2, blocks(0, 0))
    assert stage.asked_by_peer(Follow(1, 0)) == [Grown(1, 0, 1, 2, blocks(0, 0), closed=False)]
    told = len(stage.answers)
    extend(stage, 4, blocks(1, 4))
    extend(stage, 5, blocks(2, 2))
    assert len(stage.answers) == told
    assert stage.asked_by_peer(Follow(1, 1)) == [Grown(1, 1, 3, 5, blocks(1, 4, 2), closed=False)]


def test_a_lost_answer_is_given_again(stage):
    opened(stage)
    stage.asked_by_peer(claim())
    extend(stage, 2, blocks(0, 0))
    assert stage.asked_by_peer(Follow(1, 0)) == stage.asked_by_peer(Follow(1, 0))


def test_much_is_told_in_several_answers_of_which_only_the_last_is_closed(stage, monkeypatch):
    """Or thirty bytes of a peer would bring megabytes, thousands of which lie unread."""
    monkeypatch.setattr(limits, "MAX_PART_BLOCKS", 32)
    monkeypatch.setattr(limits, "BLOCKS_PER_SPAN", 14)
    opened(stage)
    stage.asked_by_peer(claim())
    extend(stage, 2, blocks(0, 0))
    extend(stage, 4, blocks(1, 1))
    extend(stage, 6, blocks(2, 2))
    extend(stage, 8, blocks(3, 3), closes=True)
    told = [stage.asked_by_peer(Follow(1, seen))[0] for seen in (0, 2)]
    assert told == [
        Grown(1, 0, 2, 4, blocks(0, 0, 1), closed=False, stamp=told[0].stamp),
        Grown(1, 2, 4, 8, blocks(2, 2, 3), closed=True, stamp=told[0].stamp),
    ]
    assert stage.asked_by_peer(Follow(1, 4)) == []


def test_what_is_named_at_once_is_told_in_parts_that_are_complete_with_the_last_of_them(stage, monkeypatch):
    monkeypatch.setattr(limits, "MAX_PART_BLOCKS", 3)
    monkeypatch.setattr(limits, "BLOCKS_PER_SPAN", 0)
    opened(stage)
    [grant] = stage.asked_by_peer(claim())
    extend(stage, 2, blocks(0, 0))
    extend(stage, 15, blocks(1, 1, 2, 3, 4, 5, 6, 7), closes=True)
    told, seen = [], 0
    while not told or not told[-1].closed:
        told += stage.asked_by_peer(Follow(1, seen))
        seen = told[-1].parts
    assert [(each.tokens, len(each.spans[0].ids) // 4) for each in told] == [(2, 1), (2, 3), (2, 3), (15, 1)]
    assert joined([each.spans for each in told]) == blocks(0, *range(8))
    fence = Fence(1, grant.generation, proof=whole(15, *blocks(0, *range(8))))
    assert stage.asked_by_peer(fence) == [Held(1)]


def test_who_asks_again_and_again_for_what_it_was_told_is_soon_not_heard(monkeypatch):
    monkeypatch.setattr("kvd.actors.leases.answers._UNKNOWN", RateLimit(1, 3))
    stage = Stage()
    stage.attach()
    opened(stage)
    extend(stage, 2, blocks(0, 0))
    extend(stage, 4, blocks(1, 1))
    for sender in (b"greedy#1", b"other#1"):
        stage.asked_by_peer(claim(), sender)
    assert [len(stage.asked_by_peer(Follow(1, 0), b"greedy#1")) for _ in range(6)] == [1, 1, 1, 1, 0, 0]
    assert len(stage.asked_by_peer(Follow(1, 0), b"other#1")) == 1
    assert stage.asked_by_peer(Follow(1, 2), b"other#1") == []
    stage.run(1.1)
    assert len(stage.asked_by_peer(Follow(1, 0), b"greedy#1")) == 1


def test_the_close_is_told_with_the_word_that_has_the_stamp_over_the_whole(stage):
    [offered] = opened(stage)
    [rank] = ticket.decode(offered.ticket).ranks
    stage.asked_by_peer(claim())
    extend(stage, 2, blocks(0, 0))
    extend(stage, 3, blocks(1, 1), closes=True)
    [grown] = stage.asked_by_peer(Follow(1, 0))
    assert (grown.closed, grown.tokens, grown.spans) == (True, 3, blocks(0, 0, 1))
    found = int.from_bytes(stage.dependencies.stamps.words[grown.stamp - 1].tobytes(), "little")
    assert found == ticket.stamp(SECRET, rank.generation, whole(3, *blocks(0, 0, 1)), rank.epoch)


def test_a_fence_holds_only_after_the_close_and_with_a_proof_over_the_whole(stage):
    opened(stage)
    [grant] = stage.asked_by_peer(claim())
    extend(stage, 2, blocks(0, 0))
    part, all_of_it = whole(2, *blocks(0, 0)), whole(4, *blocks(0, 0, 1))
    assert isinstance(stage.asked_by_peer(Fence(1, grant.generation, proof=part))[0], Broken)
    extend(stage, 4, blocks(1, 1), closes=True)
    for wrong in (None, part, bytes(16)):
        [broken] = stage.asked_by_peer(Fence(1, grant.generation, proof=wrong))
        assert "the offer 'o' is not closed, or has blocks that were not read" in broken.text
    assert stage.asked_by_peer(Fence(1, grant.generation + 1, proof=all_of_it))[0].code == ErrorCode.LEASE_BROKEN
    assert released(stage) == []
    for _ in range(2):
        assert stage.asked_by_peer(Fence(1, grant.generation, proof=all_of_it)) == [Held(1)]
    assert released(stage) == [("o", "read")]


def test_no_fence_holds_once_a_growing_offer_is_withdrawn(stage):
    opened(stage)
    [grant] = stage.asked_by_peer(claim())
    stage.asked_by_peer(Follow(1, 0))
    extend(stage, 2, blocks(0, 0))
    stage.request(Cancel(3, "o"))
    assert isinstance(stage.answers[-1][1], Broken)
    assert isinstance(stage.asked_by_peer(Fence(1, grant.generation, proof=whole(2, *blocks(0, 0))))[0], Broken)
    assert isinstance(stage.asked_by_peer(Follow(1, 1))[0], Broken)
    code, text = refused(extend(stage, 4, blocks(1, 1), closes=True))
    assert (code, text) == (ErrorCode.OFFER_GONE, "the offer 'o' has ended (withdrawn)")


def test_a_reader_that_was_never_granted_is_told_so(stage):
    [broken] = stage.asked_by_peer(Follow(9, 0))
    assert (type(broken), broken.claims) == (Broken, (9,))


WRONG = {
    "goes-back": (1, (), False, ErrorCode.BAD_MESSAGE, "the offer 'o' is extended to token 1, and has 2 already"),
    "leaves-a-gap": (6, blocks(2, 2), False, ErrorCode.BAD_BLOCKS, "group 0 are named from position 2 on; .* end at 1"),
    "overlaps": (6, blocks(0, 2), False, ErrorCode.BAD_BLOCKS, "group 0 are named from position 0 on; .* end at 1"),
    "holds-too-little": (5, blocks(1, 2), False, ErrorCode.BAD_BLOCKS, "5 tokens are said .* group 0 hold 4"),
    "names-none": (5, blocks(9), False, ErrorCode.BAD_BLOCKS, "5 tokens are said .* group 0 hold 2"),
    "window": (2, blocks(0, 1, group=1), False, ErrorCode.BAD_BLOCKS, "group 1 .*Sliding.* name them at the close"),
    "other-group": (2, blocks(0, 1, group=2), False, ErrorCode.BAD_BLOCKS, "group 2 is named; there are 2 groups"),
    "other-pool": (4, blocks(1, 99), False, ErrorCode.BAD_BLOCKS, "99"),
}


@pytest.mark.parametrize(("tokens", "spans", "closes", "code", "text"), WRONG.values(), ids=WRONG)
def test_an_extension_that_does_not_go_on_where_the_last_ended_is_refused_and_changes_nothing(
    tokens, spans, closes, code, text
):
    stage = Stage()
    stage.attach(raw=HYBRID.raw)
    opened(stage)
    extend(stage, 2, blocks(0, 0))
    found, said = refused(extend(stage, tokens, spans, closes=closes))
    assert found == code
    assert re.search(text, said)
    assert extend(stage, 4, (*blocks(1, 1), *blocks(0, 3, 4, group=1)), closes=True) == [Extended(7)]


def test_a_span_without_blocks_holds_no_tokens(stage):
    opened(stage)
    code, text = refused(extend(stage, 10, blocks(5)))
    assert (code, "10 tokens are said to be complete" in text) == (ErrorCode.BAD_BLOCKS, True)


def test_a_closed_offer_takes_nothing_more(stage):
    opened(stage)
    extend(stage, 2, blocks(0, 0), closes=True)
    for closes in (False, True):
        code, text = refused(extend(stage, 4, blocks(1, 1), closes=closes))
        assert (code, text) == (ErrorCode.WRONG_STATE, "the offer 'o' is closed, with 2 tokens; make another one")
    stage.offer("at-once", (4, 5))
    assert refused(extend(stage, 8, blocks(2, 6), offer="at-once"))[0] == ErrorCode.WRONG_STATE
    assert refused(extend(stage, 8, blocks(2, 6), offer="never"))[0] == ErrorCode.UNKNOWN_REQUEST


def test_an_offer_that_is_opened_with_blocks_is_refused(stage):
    [error] = stage.request(Offer(1, "o", 2, blocks(0, 0), 30.0, SECRET, grows=True))
    assert "is opened with 2 tokens and 1 spans" in error.text


def test_blocks_stand_in_the_offer_from_the_moment_they_are_named_until_it_ends(stage):
    opened(stage)
    extend(stage, 2, blocks(0, 0))
    assert stage.pull("early", (0,))[0].code == ErrorCode.BLOCKS_BUSY
    stage.pull("other", (1,))
    assert refused(extend(stage, 4, blocks(1, 1)))[0] == ErrorCode.BLOCKS_BUSY
    extend(stage, 4, blocks(1, 5))
    extend(stage, 6, blocks(2, 5), closes=True)  # twice: it is the worker's own affair
    assert stage.actors.leases.offers._held.of(Hold.OFFERED).blocks == 3
    stage.request(Cancel(3, "o"))
    assert stage.actors.leases.offers._held.of(Hold.OFFERED).blocks == 0
    assert stage.pull("later", (0, 5)) == []
    assert not stage.actors.leases.offers.bounds.parts


def test_each_span_that_is_named_counts_until_its_offer_has_ended(monkeypatch):
    monkeypatch.setattr(limits, "MAX_PARTS_PER_WORKER", 4)
    stage = Stage()
    stage.attach(raw=HYBRID.raw)
    opened(stage)
    extend(stage, 0, ())
    extend(stage, 2, blocks(0, 0))
    extend(stage, 4, (*blocks(1, 1), *blocks(0, 3, 4, group=1)), closes=True)
    [refusal] = stage.offer("other", (5,))
    assert (refusal.code, "4 parts of this worker's offers stand" in refusal.text) == (ErrorCode.OVERLOADED, True)
    stage.request(Cancel(3, "o"))
    assert isinstance(stage.offer("other", (5,))[0], Offered)


def test_an_offer_of_very_many_parts_is_given_back_some_at_a_time_even_if_they_are_empty(stage, monkeypatch):
    monkeypatch.setattr(limits, "BLOCKS_PER_RETURN", 1)
    monkeypatch.setattr(limits, "BATCH_BLOCKS", 3)
    opened(stage)
    for _ in range(9):
        extend(stage, 0, ())
    calls = []
    give_back = stage.actors.leases.offers._returns._give_back
    monkeypatch.setattr(
        stage.actors.leases.offers._returns._parts, "_handle", lambda some: calls.append(len(some)) or give_back(some)
    )
    stage.request(Cancel(3, "o"))
    assert calls == [3, 3, 4]
    assert released(stage) == [("o", "withdrawn")]


def test_the_time_of_an_offer_begins_anew_with_each_extension(stage):
    opened(stage, ttl=1.0)
    stage.run(0.9)
    extend(stage, 2, blocks(0, 0))
    stage.run(0.9)
    extend(stage, 2, (), closes=True)
    stage.run(0.9)
    assert released(stage) == []
    stage.run(0.2)
    assert released(stage) == [("o", "expired")]


def test_a_deadline_that_passed_before_an_extension_and_is_handled_behind_it_ends_nothing(stage):
    opened(stage, ttl=1.0)
    stage.run(0.9)
    extend(stage, 2, blocks(0, 0))
    stage.run(0.5)
    stage.actors.leases.offers._expired([("w", "o")])  # as where many messages wait
    assert released(stage) == []


def test_an_offer_whose_time_was_over_while_it_was_read_has_time_again_once_it_grows(stage):
    opened(stage, ttl=1.0)
    stage.asked_by_peer(claim())
    stage.run(1.5)
    extend(stage, 2, blocks(0, 0))
    stage.asked_by_peer(Release(1, finished=False))
    stage.run(0.9)
    assert released(stage) == []
    stage.run(0.2)
    assert released(stage) == [("o", "expired")]


def test_what_a_worker_has_not_closed_ends_with_its_session_and_its_readers_hear_at_once(stage):
    opened(stage)
    stage.offer("closed", (4, 5))
    stage.asked_by_peer(claim())
    stage.asked_by_peer(Follow(1, 0))
    stage.hang_up()
    told = stage.answers[-1][1]
    assert (type(told), told.claims, told.text) == (Broken, (1,), "the offer has ended (withdrawn)")
    assert isinstance(stage.asked_by_peer(make_claim(2, offer="closed", blocks=(4, 5)))[0], Grant)


def test_what_a_worker_has_not_closed_stands_while_another_ones_session_ends(stage):
    stage.attach("other", 2, pid=2)
    stage.request(Offer(1, "others", 0, (), 30.0, SECRET, grows=True), session=b"\2" * 16)
    opened(stage)
    stage.hang_up()
    assert stage.request(Extend(7, "others", 2, blocks(0, 0), True), session=b"\2" * 16) == [Extended(7)]


@pytest.mark.parametrize(
    ("bound", "most", "code"),
    [
        ("MAX_PARTS_PER_WORKER", 1, ErrorCode.OVERLOADED),
        ("MAX_PARTS_PER_OFFER", 1, ErrorCode.TOO_LARGE),
        ("MAX_SPANS_PER_OFFER", 1, ErrorCode.TOO_LARGE),
        ("MAX_BLOCKS_PER_REQUEST", 2, ErrorCode.TOO_LARGE),
    ],
)
def test_what_an_offer_may_grow_to_is_bounded(stage, monkeypatch, bound, most, code):
    monkeypatch.setattr(limits, bound, most)
    opened(stage)
    extend(stage, 4, blocks(0, 0, 1))
    found, text = refused(extend(stage, 6, blocks(2, 2)))
    assert found == code
    assert str(most) in text


@pytest.mark.parametrize("bound", ["MAX_PARTS_PER_WORKER", "MAX_PARTS_PER_OFFER", "MAX_SPANS_PER_OFFER"])
def test_an_offer_that_may_not_be_extended_any_more_can_be_closed_or_nobody_would_be_done_with_it(
    stage, monkeypatch, bound
):
    monkeypatch.setattr(limits, bound, 1)
    opened(stage)
    extend(stage, 2, blocks(0, 0))
    refused(extend(stage, 4, blocks(1, 1)))
    assert extend(stage, 6, blocks(1, 1, 2), closes=True) == [Extended(7)]


def test_readers_take_as_many_parts_as_an_offer_can_have(stage):
    """Extensions and closes of many blocks are cut: an offer has more parts than its worker named."""
    opened(stage)
    half, rest = limits.MAX_BLOCKS_PER_REQUEST // 2, limits.MAX_PARTS_PER_OFFER - 1
    for _ in range(rest):
        extend(stage, 0, ())
    stage.run(1.0)  # it may make so many requests at once, and then some a second
    for first, closes in ((0, False), (half, True)):
        assert extend(stage, 2 * (first + half), blocks(first, *[0] * half), closes=closes) == [Extended(7)]
    parts = len(stage.actors.leases.offers.find("w", "o").content.parts)
    assert limits.MAX_PARTS_PER_OFFER + 1 < parts <= limits.MAX_PARTS_TOLD


def test_many_readers_are_told_of_an_extension_some_at_a_time(stage, monkeypatch):
    monkeypatch.setattr(limits, "BATCH_BLOCKS", 4)
    told = sizes_of(stage.actors.leases.claims._answers._behind, monkeypatch)
    opened(stage)
    for number in range(5):
        stage.asked_by_peer(claim(number, consumer=f"c{number}"))
        stage.asked_by_peer(Follow(number, 0))
    stage.asked_by_peer(claim(5, consumer="asks-nothing"))
    before = len(stage.answers)
    extend(stage, 4, blocks(0, 0, 1))
    assert [answer.claim for _, answer in stage.answers[before:]] == list(range(5))
    assert told == [2, 2, 1]


def test_a_reader_whose_claim_ends_before_its_turn_comes_is_not_told(stage, monkeypatch):
    monkeypatch.setattr(limits, "BATCH_BLOCKS", 1)
    opened(stage)
    for number in range(2):
        stage.asked_by_peer(claim(number, consumer=f"c{number}"))
        stage.asked_by_peer(Follow(number, 0))
    answers = stage.actors.leases.claims._answers
    tell = answers._tell_all_grown

    def tell_and_release(claims):
        tell(claims)
        stage.actors.leases.claims.requested(b"peer", "peer", Release(1, finished=False))

    monkeypatch.setattr(answers._behind, "_handle", tell_and_release)
    extend(stage, 2, blocks(0, 0))
    assert [answer.claim for _, answer in stage.answers if isinstance(answer, Grown)] == [0]


def test_claims_that_waited_for_one_offer_are_judged_some_at_a_time_those_that_leave_last(stage, monkeypatch):
    monkeypatch.setattr(limits, "BATCH_ITEMS", 2)
    judged = sizes_of(stage.actors.leases.claims._judging, monkeypatch)
    for number in range(5):
        stage.asked_by_peer(claim(number, consumer=f"c{number}"))
    stage.asked_by_peer(Release(0, finished=True))
    opened(stage)
    assert [(type(answer), answer.claim) for _, answer in stage.answers] == [(Grant, number) for number in range(1, 5)]
    assert judged == [2, 2, 1]
    assert stage.actors.leases.claims.waiting == 0


def test_a_claim_that_is_released_before_it_is_judged_holds_nothing(stage, monkeypatch):
    monkeypatch.setattr(limits, "BATCH_ITEMS", 1)
    claims = stage.actors.leases.claims
    for number in range(2):
        stage.asked_by_peer(claim(number))
    judge = claims._judge_waiting

    def judge_and_release(some):
        judge(some)
        claims.requested(b"peer", "peer", Release(1, finished=False))

    monkeypatch.setattr(claims._judging, "_handle", judge_and_release)
    opened(stage)
    assert [answer.claim for _, answer in stage.answers] == [0]
    assert (claims.held, claims.waiting) == (1, 0)


def test_offers_that_many_claim_end_a_few_at_a_time_with_their_workers_session(stage, monkeypatch):
    monkeypatch.setattr(limits, "BATCH_BLOCKS", 4 * limits.BLOCKS_PER_CLAIM)
    ended = sizes_of(stage.actors.leases.offers._revoking, monkeypatch)
    for offer in range(3):
        stage.request(Offer(1, f"o{offer}", 0, (), 30.0, SECRET, grows=True))
        for number in range(2):
            shown = ticket.proof(SECRET, "w", f"o{offer}", 0, ())
            made = make_claim(10 * offer + number, offer=f"o{offer}")
            stage.asked_by_peer(msgspec.structs.replace(made, proof=shown))
    stage.hang_up()
    assert ended == [2, 1]
    assert stage.actors.leases.claims.held == 0


@pytest.mark.parametrize("how", ["expire", "hang up"])
def test_offers_of_many_parts_without_blocks_end_a_few_at_a_time(how, monkeypatch):
    monkeypatch.setattr(limits, "BLOCKS_PER_RETURN", 1)
    monkeypatch.setattr(limits, "BATCH_BLOCKS", 8)
    stage = Stage()
    stage.attach()
    offers = stage.actors.leases.offers
    for offer in range(4):
        stage.request(Offer(1, f"o{offer}", 0, (), 30.0, SECRET, grows=True))
        for _ in range(3):
            stage.request(Extend(1, f"o{offer}", 0, ()))
    ended = sizes_of(offers._due._expired.__self__ if how == "expire" else offers._revoking, monkeypatch)
    stage.run(31.0) if how == "expire" else stage.hang_up()
    assert ended == [2, 2]
    assert not offers.bounds.standing


def test_a_peer_is_told_of_many_blocks_at_a_pace_and_of_few_at_once(monkeypatch):
    """Or it would have the daemon keep gigabytes, by leaving them unread on ever new connections."""
    monkeypatch.setattr("kvd.actors.leases.answers._TOLD", RateLimit(8, 12))
    monkeypatch.setattr(limits, "SMALL_TOLD_BYTES", 4)
    stage = Stage()
    stage.attach()
    opened(stage)
    extend(stage, 6, blocks(0, 0, 1, 2))
    for number in range(3):
        for sender in (b"greedy#1", b"greedy#2", b"other#1"):
            stage.asked_by_peer(claim(number), sender)
    told = [len(stage.asked_by_peer(Follow(number, 0), b"greedy#%d" % (1 + number % 2))) for number in range(3)]
    assert told == [1, 0, 0]
    assert len(stage.asked_by_peer(Follow(0, 0), b"other#1")) == 1
    stage.run(0.2)
    assert len(stage.asked_by_peer(Follow(1, 0), b"greedy#2")) == 1
    extend(stage, 8, blocks(3, 3))
    assert [len(stage.asked_by_peer(Follow(0, seen), b"greedy#2")) for seen in (0, 1)] == [0, 1]


def test_what_a_peer_was_not_told_at_once_it_is_told_when_it_asks_again(monkeypatch):
    monkeypatch.setattr("kvd.actors.leases.answers._TOLD", RateLimit(8, 8))
    monkeypatch.setattr(limits, "SMALL_TOLD_BYTES", 0)
    stage = Stage()
    stage.attach()
    opened(stage)
    for number in range(2):
        stage.asked_by_peer(claim(number))
        stage.asked_by_peer(Follow(number, 0))
    before = len(stage.answers)
    extend(stage, 4, blocks(0, 0, 1))
    assert [answer.claim for _, answer in stage.answers[before:]] == [0]
    stage.run(1.0)
    assert stage.asked_by_peer(Follow(1, 0)) == [Grown(1, 0, 1, 4, blocks(0, 0, 1), closed=False)]
