import sys
from collections import Counter

import pytest
from structlog.testing import capture_logs

from kvd import limits
from kvd.actors.runtime.actor import call
from kvd.actors.runtime.pace import RateLimit
from kvd.actors.runtime.pools import Hold
from kvd.errors import ErrorCode
from kvd.protocol import ticket
from kvd.protocol.peer import Broken, Fence, Grant, Held, Refuse, Release, Renew, Settle, Settled
from kvd.protocol.types import Span
from kvd.protocol.worker import Cancel, Detach, Error, Offer, Offered, Released
from tests.actors.scheduler.pulling import start_reading
from tests.actors.stage import CACHE, INCARNATION, SECRET, Stage, ids
from tests.actors.stage import make_claim as claim


@pytest.fixture
def stage():
    stage = Stage(claim_wait=2.0, tombstone=10.0)
    stage.attach()
    return stage


def released(stage):
    return [(item.offer, item.reason) for item in stage.notified if isinstance(item, Released)]


def test_an_offer_is_answered_with_a_ticket(stage):
    [offered] = stage.offer()
    assert isinstance(offered, Offered)
    [rank] = ticket.decode(offered.ticket).ranks
    assert (rank.daemon, rank.pool, rank.offer, rank.incarnation) == ("d", "w", "o", INCARNATION)


def stamp_of(stage, offered):
    """What lies in the word that an offer's ticket names, and what should while its lease is alive."""
    named = ticket.decode(offered.ticket)
    [rank] = named.ranks
    words = stage.dependencies.stamps.words
    found = int.from_bytes(words[rank.stamp - 1].tobytes(), "little")
    return found, ticket.stamp(SECRET, rank.generation, named.proof(rank), rank.epoch)


def test_the_stamp_of_a_lease_lies_in_its_word_until_just_before_its_worker_hears_that_it_has_ended(stage):
    [offered] = stage.offer()
    found, right = stamp_of(stage, offered)
    assert found == right
    seen = []
    stage.dependencies.worker_port.send = lambda *_: seen.append(stamp_of(stage, offered)[0]) or True
    stage.request(Cancel(9, "o"))
    assert seen
    assert set(seen) == {0}


def test_an_offer_beyond_the_words_has_no_stamp_and_is_served_all_the_same(stage):
    words = len(stage.dependencies.stamps.words)
    tickets = [stage.offer(f"o{number}", call=number)[0].ticket for number in range(words + 1)]
    numbers = [ticket.decode(text).ranks[0].stamp for text in tickets]
    assert sorted(numbers) == list(range(words + 1))
    assert numbers[-1] == 0
    assert isinstance(stage.asked_by_peer(claim(offer=f"o{words}"))[0], Grant)


def test_readers_that_are_settled_are_counted_and_answered_whatever_became_of_the_lease(stage):
    [offered] = stage.offer()
    [rank] = ticket.decode(offered.ticket).ranks
    fences = tuple(
        Fence(number, rank.generation, claim(number, generation=rank.generation, reader=number - 1, readers=2))
        for number in (1, 2)
    )
    assert stage.asked_by_peer(Settle(fences[:1])) == [Settled((1,))]
    assert released(stage) == []
    assert stage.asked_by_peer(Settle(fences)) == [Settled((1, 2))]
    assert released(stage) == [("o", "read")]
    assert stage.asked_by_peer(Settle((unclaimed(rank.generation, 3),))) == [Settled((3,))]


def test_a_fence_with_a_claim_that_is_held_already_counts_it_once(stage):
    [offered] = stage.offer()
    [rank] = ticket.decode(offered.ticket).ranks
    stage.asked_by_peer(claim())
    assert stage.asked_by_peer(Fence(1, rank.generation, claim())) == [Held(1)]
    assert stage.actors.leases.claims.held == 0
    assert stage.actors.leases.claims._served == 0


def test_an_offer_that_stands_cannot_be_made_again(stage):
    stage.offer()
    [error] = stage.offer(call=8)
    assert (type(error), error.call, error.code) == (Error, 8, ErrorCode.DUPLICATE_REQUEST)


def test_an_offer_needs_time(stage):
    assert stage.offer(ttl=0.0)[0].code == ErrorCode.BAD_MESSAGE


def test_an_offer_that_nobody_claims_expires(stage):
    stage.offer(ttl=1.0)
    stage.run(0.9)
    assert released(stage) == []
    stage.run(0.2)
    assert released(stage) == [("o", "expired")]


def test_a_claim_holds_an_offer_beyond_its_time(stage):
    stage.offer(ttl=1.0)
    stage.asked_by_peer(claim())
    stage.run(3.0)
    assert released(stage) == []
    stage.asked_by_peer(Release(1, finished=False))
    assert released(stage) == [("o", "expired")]


def test_a_fence_that_held_releases_the_offer_once_every_reader_has_finished(stage):
    stage.offer()
    [one] = stage.asked_by_peer(claim(1, reader=0, readers=2))
    [other] = stage.asked_by_peer(claim(1, reader=1, readers=2), sender=b"other")
    assert one.generation == other.generation
    assert stage.asked_by_peer(Fence(1, one.generation)) == [Held(1)]
    assert released(stage) == []
    assert stage.asked_by_peer(Fence(1, one.generation), sender=b"other") == [Held(1)]
    assert released(stage) == [("o", "read")]


def test_asks_that_come_twice_are_answered_the_same(stage):
    stage.offer()
    assert stage.asked_by_peer(claim()) == stage.asked_by_peer(claim())
    generation = stage.answers[-1][1].generation
    assert stage.asked_by_peer(Fence(1, generation)) == stage.asked_by_peer(Fence(1, generation)) == [Held(1)]
    assert stage.asked_by_peer(claim()) == []  # a late copy, of a claim that has ended


def test_a_fence_with_another_generation_does_not_hold(stage):
    stage.offer()
    [grant] = stage.asked_by_peer(claim())
    [broken] = stage.asked_by_peer(Fence(1, grant.generation + 1))
    assert isinstance(broken, Broken)


def test_a_fence_of_another_sender_does_not_hold(stage):
    stage.offer()
    [grant] = stage.asked_by_peer(claim())
    [broken] = stage.asked_by_peer(Fence(1, grant.generation), sender=b"stranger")
    assert isinstance(broken, Broken)


def test_a_withdrawn_offer_breaks_its_claims_before_the_worker_may_write(stage):
    stage.offer()
    [grant] = stage.asked_by_peer(claim())
    stage.request(Cancel(3, "o"))
    told = stage.answers[-1][1]
    assert (type(told), told.text) == (Broken, "the offer has ended (withdrawn)")
    assert released(stage) == [("o", "withdrawn")]
    [broken] = stage.asked_by_peer(Fence(1, grant.generation))
    assert isinstance(broken, Broken)
    assert "withdrawn" in broken.text


def test_whoever_withdraws_an_offer_that_never_came_is_told_so_though_the_name_has_been_used(stage):
    """Its worker has sent it twice, and the second time it was lost with the session."""
    stage.offer()
    stage.request(Cancel(3, "o"))
    assert released(stage) == [("o", "withdrawn")]
    [error] = stage.request(Cancel(4, "o"))
    assert (error.call, error.code, error.upcoming) == (4, ErrorCode.UNKNOWN_REQUEST, 2)


def test_nobody_is_told_that_an_offer_is_unknown_whose_blocks_are_still_given_back(stage, monkeypatch):
    monkeypatch.setattr(limits, "BATCH_BLOCKS", 0)
    stage.offer()
    call(stage.actors.leases.withdraw, "w", Cancel(3, "o"))
    call(stage.actors.leases.withdraw, "w", Cancel(4, "o"))
    stage.run()
    assert released(stage) == [("o", "withdrawn")]
    assert not [reply for _, reply in stage.to_workers if isinstance(reply, Error)]


def test_an_offer_made_again_under_the_same_name_is_another_one(stage):
    stage.offer()
    [grant] = stage.asked_by_peer(claim())
    stage.request(Cancel(3, "o"))
    stage.offer()
    [again] = stage.asked_by_peer(claim(2))
    assert again.generation > grant.generation
    [broken] = stage.asked_by_peer(Fence(1, again.generation))
    assert isinstance(broken, Broken)


def test_a_claim_that_is_not_renewed_lapses(stage):
    stage.offer(ttl=1.0)
    [grant] = stage.asked_by_peer(claim(ttl=2.0))
    stage.run(1.5)
    stage.asked_by_peer(Renew((1,)))
    stage.run(1.5)
    assert released(stage) == []
    stage.run(1.0)
    assert released(stage) == [("o", "expired")]
    [broken] = stage.asked_by_peer(Fence(1, grant.generation))
    assert "not renewed for 2 s" in broken.text


def test_a_claim_that_was_renewed_while_this_daemon_stood_still_does_not_lapse(stage):
    stage.offer(ttl=600.0)
    stage.asked_by_peer(claim())
    stage.stand_still(6.0)
    stage.asked_by_peer(Renew((1,)))  # it had lain in the socket
    stage.run(4.9)
    assert not any(isinstance(answer, Broken) for _, answer in stage.answers)
    stage.run(0.2)
    assert isinstance(stage.answers[-1][1], Broken)


def test_an_offer_that_was_claimed_while_this_daemon_stood_still_is_granted(stage):
    stage.offer(ttl=5.0)
    stage.stand_still(6.0)
    assert isinstance(stage.asked_by_peer(claim())[0], Grant)


def test_renewing_what_is_not_held_is_answered(stage):
    [broken] = stage.asked_by_peer(Renew((99,)))
    assert (type(broken), broken.claims, broken.code) == (Broken, (99,), ErrorCode.LEASE_BROKEN)


def test_a_claim_waits_for_its_offer(stage):
    assert stage.asked_by_peer(claim()) == []
    stage.run(1.0)
    stage.offer()
    assert isinstance(stage.answers[-1][1], Grant)


def test_a_claim_waits_no_longer_for_being_asked_again_and_is_told_the_same_afterwards(stage):
    for _ in range(4):
        assert stage.asked_by_peer(claim()) == []
        stage.run(0.45)
    stage.run(0.3)
    [(_, refuse)] = stage.answers
    assert (type(refuse), refuse.code) == (Refuse, ErrorCode.OFFER_GONE)
    assert stage.asked_by_peer(claim()) == [refuse]
    stage.offer()
    assert stage.asked_by_peer(claim()) == [refuse]


def test_a_claim_under_the_number_of_one_that_waits_changes_nothing(stage):
    stage.asked_by_peer(claim())
    stage.asked_by_peer(claim(offer="other"))
    stage.offer("other")
    assert stage.answers == []
    stage.offer()
    assert isinstance(stage.answers[-1][1], Grant)
    assert not stage.actors.leases.claims._waiting._by_offer


def test_a_claim_does_not_wait_for_ever(stage):
    stage.asked_by_peer(claim())
    stage.run(2.1)
    [(_, refuse)] = stage.answers
    assert (type(refuse), refuse.code) == (Refuse, ErrorCode.OFFER_GONE)


def test_a_claim_that_is_let_go_waits_no_more(stage):
    stage.asked_by_peer(claim())
    stage.asked_by_peer(Release(1, finished=False))
    stage.offer()
    assert stage.answers == []


def cancelled_early(stage, number=1, **which):
    assert stage.asked_by_peer(claim(number, **which)) == []
    assert stage.asked_by_peer(Release(number, finished=True)) == []


def test_the_reader_of_a_claim_that_was_cancelled_before_its_offer_has_finished_when_the_offer_comes(stage):
    cancelled_early(stage)
    stage.run(1.0)
    stage.offer()
    assert released(stage) == [("o", "read")]
    assert stage.answers == []
    assert not stage.actors.leases.claims._records
    assert stage.actors.leases.claims.held == 0


def will_not_come(number=1, **which):
    return Settle((Fence(number, 0, claim(number, **which)),))


@pytest.mark.parametrize("before", [(), (claim(),)], ids=["unheard", "claimed"])
@pytest.mark.parametrize("offered", [False, True])
def test_a_reader_that_settles_because_it_will_not_come_has_finished_when_its_offer_is_there(stage, before, offered):
    if offered:
        stage.offer()
    for ask in before:
        stage.asked_by_peer(ask)
    for _ in range(2):
        assert stage.asked_by_peer(will_not_come()) == [Settled((1,))]
    if not offered:
        assert released(stage) == []
        stage.offer()
    assert released(stage) == [("o", "read")]
    assert stage.asked_by_peer(will_not_come()) == [Settled((1,))]
    assert not stage.actors.leases.claims._records
    assert stage.actors.leases.claims.held == 0


def test_a_reader_that_will_not_come_is_counted_once_however_often_it_says_so(stage):
    stage.offer(consumers=2)
    for number in (1, 1, 2):
        assert stage.asked_by_peer(will_not_come(number)) == [Settled((number,))]
    assert released(stage) == []
    assert stage.asked_by_peer(will_not_come(3, consumer="another")) == [Settled((3,))]
    assert released(stage) == [("o", "read")]


def test_who_says_that_it_will_not_come_must_show_the_ticket(stage):
    [offered] = stage.offer()
    [rank] = ticket.decode(offered.ticket).ranks
    for wrong in ({"secret": bytes(16)}, {"generation": rank.generation + 1}, {"blocks": (0, 2)}):
        assert stage.asked_by_peer(will_not_come(**wrong)) == [Settled((1,))]
    assert stage.asked_by_peer(Settle((Fence(1, 0),))) == [Settled((1,))]
    assert released(stage) == []
    assert not stage.actors.leases.claims._records


def test_each_reader_that_left_before_the_offer_counts_as_one_of_its_consumer(stage):
    cancelled_early(stage, 1, reader=0, readers=2)
    stage.offer()
    assert released(stage) == []
    [grant] = stage.asked_by_peer(claim(2, reader=1, readers=2))
    assert stage.asked_by_peer(Fence(2, grant.generation)) == [Held(2)]
    assert released(stage) == [("o", "read")]


def test_a_consumer_that_waits_is_served_though_another_left_before_the_offer(stage):
    cancelled_early(stage, 1, consumer="A")
    stage.asked_by_peer(claim(2, consumer="B"))
    stage.offer()
    [(_, grant)] = stage.answers
    assert (type(grant), grant.claim) == (Grant, 2)
    assert released(stage) == []
    assert stage.asked_by_peer(Fence(2, grant.generation)) == [Held(2)]
    assert released(stage) == [("o", "read")]


def test_who_leaves_before_the_offer_without_its_secret_ends_nothing_and_gets_no_answer(stage):
    cancelled_early(stage, secret=bytes(16))
    stage.offer()
    stage.run(5.0)
    assert (released(stage), stage.answers) == ([], [])
    assert not stage.actors.leases.claims._records


@pytest.mark.parametrize("more", [Release(1, finished=True), Release(1, finished=False), claim()])
def test_a_claim_that_was_cancelled_early_waits_no_longer_for_what_comes_again(stage, more):
    cancelled_early(stage)
    for _ in range(3):
        stage.run(0.5)
        assert stage.asked_by_peer(more) == []
    assert len(stage.actors.leases.claims._waiting) == 1
    stage.run(0.6)
    assert not stage.actors.leases.claims._records
    assert len(stage.actors.leases.claims._waiting) == 0
    stage.offer()
    stage.run(1.0)
    assert (released(stage), stage.answers) == ([], [])


def test_claims_that_were_cancelled_early_have_their_share_of_those_that_wait(stage, monkeypatch):
    monkeypatch.setattr(limits, "MAX_CLAIMS_WAITING_PER_PEER", 2)
    for number in (1, 2):
        cancelled_early(stage, number, offer=f"o{number}")
    cancelled_early(stage, 3, offer="o3")
    assert len(stage.actors.leases.claims._waiting) == 2
    for name in ("o1", "o2", "o3"):
        stage.offer(name)
    assert released(stage) == [("o2", "read"), ("o3", "read")]


def test_claims_that_were_cancelled_early_give_their_places_to_those_that_are_wanted(stage, monkeypatch):
    monkeypatch.setattr(limits, "MAX_CLAIMS_WAITING_PER_PEER", 2)
    for number in (1, 2):
        cancelled_early(stage, number, offer=f"o{number}")
    assert [stage.asked_by_peer(claim(number, offer=f"o{number}")) for number in (3, 4)] == [[], []]
    [refuse] = stage.asked_by_peer(claim(5, offer="o5"))
    assert refuse.code == ErrorCode.OVERLOADED
    stage.answers.clear()
    stage.offer("o3")
    assert [grant.claim for _, grant in stage.answers] == [3]
    assert released(stage) == []
    stage.run(3.0)
    waiting = stage.actors.leases.claims._waiting
    assert (len(waiting), waiting._leaving, stage.actors.leases.claims.held) == (0, {}, 1)


def test_a_claim_cancelled_early_by_one_peer_gives_its_place_to_another_peer_only_where_all_places_are_taken(
    stage, monkeypatch
):
    monkeypatch.setattr(limits, "MAX_CLAIMS_WAITING", 2)
    monkeypatch.setattr(limits, "MAX_CLAIMS_WAITING_PER_PEER", 1)
    cancelled_early(stage, 1, offer="o1")
    assert stage.asked_by_peer(claim(2, offer="o2"), b"other#1") == []
    [refuse] = stage.asked_by_peer(claim(3, offer="o3"), b"other#1")
    assert refuse.code == ErrorCode.OVERLOADED
    assert stage.asked_by_peer(claim(4, offer="o4"), b"third#1") == []
    assert [each.key.claim for each in stage.actors.leases.claims._waiting.all()] == [2, 4]


def test_claims_that_were_cancelled_early_end_when_the_drain_begins(stage):
    cancelled_early(stage)
    call(stage.actors.leases.drain)
    stage.run(5.0)
    assert stage.answers == []
    assert not stage.actors.leases.claims._records


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (claim(blocks=(0, 2)), ErrorCode.BAD_TICKET),
        (claim(incarnation=INCARNATION - 1), ErrorCode.OFFER_GONE),
        (claim(pool="nobody"), ErrorCode.OFFER_GONE),
    ],
)
def test_claims_that_cannot_be_granted_are_refused(stage, asked, code):
    stage.offer()
    [refuse] = stage.asked_by_peer(asked)
    assert (type(refuse), refuse.code) == (Refuse, code)


def test_a_claim_of_an_offer_that_has_ended_is_told_why(stage):
    stage.offer()
    stage.request(Cancel(3, "o"))
    [refuse] = stage.asked_by_peer(claim())
    assert "withdrawn" in refuse.text


def test_what_has_ended_is_forgotten_after_a_while(stage):
    stage.offer()
    [grant] = stage.asked_by_peer(claim())
    stage.asked_by_peer(Fence(1, grant.generation))
    stage.run(11.0)
    leases = stage.actors.leases
    assert not leases.offers._leases
    assert not leases.claims._records
    assert not len(leases._tombstones)


def test_a_drained_daemon_offers_nothing_and_ends_what_nobody_claimed(stage):
    stage.offer("claimed")
    stage.offer("unclaimed", blocks=(2, 3))
    stage.asked_by_peer(claim(offer="claimed"))
    call(stage.actors.leases.drain)
    stage.run(0.4)
    assert released(stage) == []
    stage.run(0.2)
    assert released(stage) == [("unclaimed", "shutdown")]
    assert stage.idle == []
    [error] = stage.offer("new", blocks=(4,))
    assert error.code == ErrorCode.SHUTTING_DOWN
    stage.asked_by_peer(Release(1, finished=True))
    assert stage.idle == ["leases"]


def test_a_ticket_that_travels_when_the_drain_begins_is_served_and_so_is_a_read_that_was_not_claimed(stage):
    stage.offer("travels")
    [offered] = stage.offer("short", blocks=(2, 3))
    call(stage.actors.leases.drain)
    [grant] = stage.asked_by_peer(claim(1, offer="travels"))
    assert stage.asked_by_peer(Fence(1, grant.generation)) == [Held(1)]
    assert stage.idle == []
    [rank] = ticket.decode(offered.ticket).ranks
    assert stage.asked_by_peer(unclaimed(rank.generation, 2, offer="short", blocks=(2, 3))) == [Held(2)]
    assert stage.idle == ["leases"]


def test_a_claim_that_comes_during_a_drain_is_served_where_its_offer_is_read_and_else_refused_with_the_reason(stage):
    stage.offer("shared")
    stage.offer("unclaimed", blocks=(2, 3))
    stage.asked_by_peer(claim(1, offer="shared", reader=0, readers=2))
    call(stage.actors.leases.drain)
    stage.run(1.0)
    [grant] = stage.asked_by_peer(claim(2, offer="shared", reader=1, readers=2))
    assert isinstance(grant, Grant)
    [ended] = stage.asked_by_peer(claim(3, offer="unclaimed", blocks=(2, 3)))
    assert (ended.code, ended.text) == (ErrorCode.OFFER_GONE, "the offer 'unclaimed' has ended (shutdown)")
    [never] = stage.asked_by_peer(claim(4, offer="to come"))
    assert never.code == ErrorCode.SHUTTING_DOWN
    for number in (1, 2):
        assert stage.asked_by_peer(Fence(number, grant.generation)) == [Held(number)]
    assert stage.idle == ["leases"]


def test_claims_that_wait_for_their_offer_are_refused_when_the_drain_begins(stage):
    assert stage.asked_by_peer(claim(1, offer="to come")) == []
    call(stage.actors.leases.drain)
    stage.run()
    [(_, refused)] = stage.answers
    assert (refused.claim, refused.code) == (1, ErrorCode.SHUTTING_DOWN)
    stage.run(30.0)
    assert len(stage.answers) == 1


def test_too_many_offers_are_refused(stage, monkeypatch):
    monkeypatch.setattr(limits, "MAX_REQUESTS_PER_WORKER", 1)
    stage.offer()
    assert stage.offer("p")[0].code == ErrorCode.OVERLOADED


def unclaimed(generation, number=1, **which):
    return Fence(number, generation, claim(number, generation=generation, **which))


def test_a_read_that_was_not_claimed_is_proven_by_its_fence_alone(stage):
    [offered] = stage.offer()
    [rank] = ticket.decode(offered.ticket).ranks
    assert stage.asked_by_peer(unclaimed(rank.generation)) == [Held(1)]
    assert released(stage) == [("o", "read")]
    assert stage.asked_by_peer(unclaimed(rank.generation)) == [Held(1)]


def test_a_read_that_was_not_claimed_is_not_proven_once_its_offer_has_ended(stage):
    [offered] = stage.offer()
    [rank] = ticket.decode(offered.ticket).ranks
    stage.request(Cancel(3, "o"))
    [broken] = stage.asked_by_peer(unclaimed(rank.generation))
    assert isinstance(broken, Broken)
    stage.offer()
    for number in (1, 2):
        [broken] = stage.asked_by_peer(unclaimed(rank.generation, number))
        assert isinstance(broken, Broken)


def test_a_read_that_was_not_claimed_is_not_proven_where_the_ticket_names_other_blocks(stage):
    [offered] = stage.offer()
    [rank] = ticket.decode(offered.ticket).ranks
    [broken] = stage.asked_by_peer(unclaimed(rank.generation, blocks=(0, 2)))
    assert broken.code == ErrorCode.BAD_TICKET
    assert released(stage) == []


# --- secrets, and names that are used again


def test_a_ticket_of_an_offer_that_has_ended_gets_nothing_of_a_later_offer_of_its_name(stage):
    [first] = stage.offer()
    [rank] = ticket.decode(first.ticket).ranks
    stage.request(Cancel(3, "o"))
    stage.offer()
    [refuse] = stage.asked_by_peer(claim(generation=rank.generation))
    assert (type(refuse), refuse.code) == (Refuse, ErrorCode.OFFER_GONE)
    [refuse] = stage.asked_by_peer(claim(2, secret=bytes(16)))
    assert (type(refuse), refuse.code) == (Refuse, ErrorCode.BAD_TICKET)


def test_a_claim_whose_ticket_names_the_lease_never_waits(stage):
    stage.offer("another")
    [refuse] = stage.asked_by_peer(claim(generation=INCARNATION + 1))
    assert (type(refuse), refuse.code) == (Refuse, ErrorCode.OFFER_GONE)


def test_a_claim_of_an_offer_to_come_waits_though_another_of_its_name_has_ended(stage):
    stage.offer()
    stage.request(Cancel(3, "o"))
    assert stage.asked_by_peer(claim(secret=b"another's secret")) == []
    stage.request(Offer(4, "o", 4, (Span(0, 0, ids(0, 1)),), 30.0, b"another's secret"))
    assert isinstance(stage.answers[-1][1], Grant)


def test_a_guess_hears_that_it_is_wrong_and_after_many_nothing_while_a_right_proof_is_served(stage):
    [offered] = stage.offer()
    [rank] = ticket.decode(offered.ticket).ranks
    heard = []
    for number in range(2 * limits.MAX_WRONG_PROOFS):
        wrong = claim(number, secret=number.to_bytes(16, "little"), generation=rank.generation)
        ask = Fence(number, rank.generation, wrong) if number % 2 else wrong
        heard += stage.asked_by_peer(ask, sender=b"guesser#%d" % number)
    assert {(answer.code, answer.text) for answer in heard} == {(ErrorCode.BAD_TICKET, heard[0].text)}
    assert len(heard) == limits.MAX_WRONG_PROOFS
    assert stage.context.metrics.wrong_proofs._value.get() == 2 * limits.MAX_WRONG_PROOFS
    assert isinstance(stage.asked_by_peer(claim(secret=bytes(16)), sender=b"other#1")[0], Refuse)
    assert isinstance(stage.asked_by_peer(claim(), sender=b"guesser#1")[0], Grant)


@pytest.mark.parametrize("generation", [0, 1])
def test_guesses_among_readers_that_settle_are_counted_and_logged_once_for_each_peer(stage, generation):
    [offered] = stage.offer()
    named = generation * ticket.decode(offered.ticket).ranks[0].generation
    with capture_logs() as logs:
        for number in range(1, 5):
            guess = claim(number, secret=bytes(16), generation=named)
            assert stage.asked_by_peer(Settle((Fence(number, named, guess),))) == [Settled((number,))]
    assert [line["event"] for line in logs] == ["wrong proof"]
    assert stage.context.metrics.wrong_proofs._value.get() == 4
    assert released(stage) == []


@pytest.mark.parametrize("generation", [1, INCARNATION, INCARNATION + 2])
def test_a_ticket_with_a_generation_that_no_lease_has_had_is_made_up_which_is_counted_and_logged_once(
    stage, generation
):
    stage.offer()
    with capture_logs() as logs:
        answers = [stage.asked_by_peer(claim(number, generation=generation))[0] for number in (1, 2)]
    assert [answer.code for answer in answers] == [ErrorCode.BAD_TICKET] * 2
    assert stage.context.metrics.wrong_proofs._value.get() == 2
    assert [(line["event"], line["peer"]) for line in logs] == [("wrong proof", "peer")]


@pytest.mark.parametrize("kind", ["renew", "settle", "fence"])
def test_what_a_peer_says_of_claims_that_are_not_known_has_a_pace_and_holds_up_nobody_else(kind, monkeypatch):
    size = {"renew": limits.MAX_RENEWALS, "settle": limits.MAX_SETTLED, "fence": 1}[kind]
    burst, second = 16 * size, limits.MAX_UNKNOWN_CLAIMS_PER_SECOND
    monkeypatch.setattr("kvd.actors.leases.answers._UNKNOWN", RateLimit(second, burst))
    stage = Stage()
    stage.attach()
    [offered] = stage.offer(consumers=0)
    [rank] = ticket.decode(offered.ticket).ranks
    asked = 0

    def about_nothing():
        nonlocal asked
        unknown = range(asked := asked + 1_000_000, asked + limits.MAX_RENEWALS)
        if kind == "renew":
            return Renew(tuple(unknown))
        claims = [claim(number, offer="gone", generation=rank.generation) for number in unknown[: limits.MAX_SETTLED]]
        fences = tuple(Fence(each.claim, rank.generation, each) for each in claims)
        return Settle(fences) if kind == "settle" else fences[0]

    assert sum(len(stage.asked_by_peer(about_nothing(), b"idle#1")) for _ in range(2 * burst // size)) == burst // size
    assert stage.asked_by_peer(about_nothing(), b"idle#2") == []
    assert isinstance(stage.asked_by_peer(claim(1), b"idle#1")[0], Grant)
    assert isinstance(stage.asked_by_peer(claim(1), b"busy#1")[0], Grant)
    assert len(stage.asked_by_peer(Renew((1, 2)), b"busy#1")) == 1
    assert stage.asked_by_peer(Fence(1, rank.generation), b"busy#1") == [Held(1)]
    stage.run(size / second)
    assert len(stage.asked_by_peer(about_nothing(), b"idle#1")) == 1


def test_a_fence_and_the_claim_in_it_must_speak_of_one_generation(stage):
    [offered] = stage.offer()
    [rank] = ticket.decode(offered.ticket).ranks
    [broken] = stage.asked_by_peer(Fence(1, rank.generation, claim(generation=rank.generation + 1)))
    assert isinstance(broken, Broken)
    [broken] = stage.asked_by_peer(Fence(2, rank.generation + 1, claim(2, generation=rank.generation)))
    assert isinstance(broken, Broken)
    assert stage.actors.leases.claims.held == 0


# --- consumers


def fence_held(stage, number, sender, generation):
    return [type(answer) for answer in stage.asked_by_peer(Fence(number, generation), sender)]


def test_ranks_of_two_consumers_are_not_counted_together(stage):
    stage.offer()
    [grant] = stage.asked_by_peer(claim(1, consumer="A", reader=0, readers=2), b"A0")
    stage.asked_by_peer(claim(1, consumer="A", reader=1, readers=2), b"A1")
    assert fence_held(stage, 1, b"A0", grant.generation) == [Held]
    stage.asked_by_peer(Release(1, finished=False), b"A1")
    for rank in (0, 1):
        stage.asked_by_peer(claim(1, consumer="B", reader=rank, readers=2), b"B%d" % rank)
    assert fence_held(stage, 1, b"B1", grant.generation) == [Held]
    assert released(stage) == []
    assert fence_held(stage, 1, b"B0", grant.generation) == [Held]
    assert released(stage) == [("o", "read")]


def test_an_offer_for_several_consumers_ends_with_the_last_of_them(stage):
    stage.offer(consumers=2)
    for number, consumer in enumerate("AAB", 1):
        assert released(stage) == []
        [grant] = stage.asked_by_peer(claim(number, consumer=consumer))
        assert fence_held(stage, number, b"peer", grant.generation) == [Held]
    assert released(stage) == [("o", "read")]


def test_who_holds_a_claim_is_served_though_as_many_have_finished_as_were_offered_it(stage):
    stage.offer()
    [grant] = stage.asked_by_peer(claim(1, consumer="A"))
    stage.asked_by_peer(claim(2, consumer="B"))
    stage.asked_by_peer(claim(3, consumer="C"))
    assert fence_held(stage, 1, b"peer", grant.generation) == [Held]
    assert fence_held(stage, 2, b"peer", grant.generation) == [Held]
    assert released(stage) == []
    stage.asked_by_peer(Release(3, finished=False))
    assert released(stage) == [("o", "read")]


def calls_to_end(claims):
    """Calls of functions that the last fence makes of an offer that one consumer holds so many claims on."""
    stage = Stage()
    stage.attach()
    stage.offer()
    for number in range(claims):
        [grant] = stage.asked_by_peer(claim(number, consumer="c"))
    counted = Counter()
    sys.setprofile(lambda _frame, event, _argument: counted.update([event]))
    try:
        stage.asked_by_peer(Fence(0, grant.generation))
    finally:
        sys.setprofile(None)
    assert released(stage) == [("o", "read")]
    return counted["call"]


def test_the_end_of_an_offer_takes_as_many_times_longer_as_it_has_more_claims():
    assert calls_to_end(400) < 2.2 * calls_to_end(200)


def test_an_offer_with_an_open_end_is_read_until_its_time_is_over(stage):
    stage.offer(consumers=0, ttl=5.0)
    for number in range(1, 9):
        [grant] = stage.asked_by_peer(claim(number, consumer=f"c{number}"))
        assert fence_held(stage, number, b"peer", grant.generation) == [Held]
    [lease] = stage.actors.leases.offers._leases.values()
    assert not lease.finished
    assert released(stage) == []
    stage.run(5.1)
    assert released(stage) == [("o", "expired")]


def test_consumers_that_never_finish_leave_no_more_behind_than_their_bound(stage, monkeypatch):
    monkeypatch.setattr(limits, "MAX_CONSUMERS", 2)
    stage.offer()
    answers = []
    for number in range(1, 7):
        answers += stage.asked_by_peer(claim(number, consumer=f"c{number}", readers=2))
        stage.asked_by_peer(Release(number, finished=True))
    assert [getattr(answer, "code", "granted") for answer in answers] == ["granted"] * 4 + ["overloaded"] * 2


def test_readers_of_made_up_consumers_take_few_bytes_of_an_offer(stage):
    stage.offer()
    readers = limits.MAX_RANKS - 1
    [lease] = stage.actors.leases.offers._leases.values()
    for consumer in range(4):
        fences = [
            Fence(number, 0, claim(number, consumer=f"c{consumer}", reader=number % readers, readers=limits.MAX_RANKS))
            for number in range(1 + consumer * readers, 1 + (consumer + 1) * readers)
        ]
        for start in range(0, readers, limits.MAX_SETTLED):
            stage.asked_by_peer(Settle(tuple(fences[start : start + limits.MAX_SETTLED])))
    assert len(lease.finished) == 4
    assert sum(map(sys.getsizeof, lease.finished.values())) <= 4 * 256
    assert released(stage) == []


def test_consumers_of_all_offers_of_a_worker_leave_no_more_behind_than_their_bound(stage, monkeypatch):
    monkeypatch.setattr(limits, "MAX_CONSUMERS_PER_WORKER", 3)
    for name in ("o", "p"):
        stage.offer(name, consumers=8)
    answers = []
    for number in range(1, 6):
        answers += stage.asked_by_peer(claim(number, offer="op"[number % 2], consumer=f"c{number}", readers=2))
        stage.asked_by_peer(Release(number, finished=True))
    assert [getattr(answer, "code", "granted") for answer in answers] == ["granted"] * 3 + ["overloaded"] * 2
    assert "3 in all offers of its worker" in answers[-1].text
    assert isinstance(stage.asked_by_peer(claim(6, offer="p", consumer="c1", reader=1, readers=2))[0], Grant)
    stage.request(Cancel(9, "p"))
    assert isinstance(stage.asked_by_peer(claim(7, consumer="c7"))[0], Grant)


def turns_of(stage, monkeypatch):
    """When blocks are given back, and when others that came meanwhile get their turn."""
    turns, pool = [], next(iter(stage.actors.leases.offers._pools.values()))
    release = pool.blocks.release

    def gives_back(spans):
        turns.append(len(spans[0].ids) // 4)
        call(stage.actors.leases.probe, lambda _name: turns.append("other"))
        release(spans)

    monkeypatch.setattr(type(pool.blocks), "release", lambda _self, spans: gives_back(spans))
    return turns


@pytest.mark.parametrize("how", ["expire", "detach"])
def test_offers_of_many_blocks_that_end_at_one_moment_leave_others_their_turns(how, monkeypatch):
    """Each block that is given back takes the loop some 0.3 us: sixteen offers of a million took it for seconds."""
    monkeypatch.setattr(limits, "BLOCKS_PER_RETURN", 1)
    monkeypatch.setattr(limits, "BATCH_BLOCKS", 6)  # two offers, each of two blocks and a span
    stage = Stage()
    stage.attach()
    for number in range(6):
        stage.offer(f"o{number}", (0, 1), ttl=1.0)
    turns = turns_of(stage, monkeypatch)
    stage.run(1.1) if how == "expire" else stage.session(Detach())
    assert turns == [2, 2, "other", "other"] * 3
    assert sorted(released(stage)) == [(f"o{n}", "expired") for n in range(6)] or how == "detach"
    assert not stage.actors.leases.offers.bounds.standing


def test_one_offer_of_very_many_blocks_ends_at_once_and_is_given_back_in_parts(monkeypatch):
    monkeypatch.setattr(limits, "BLOCKS_PER_RETURN", 1)
    monkeypatch.setattr(limits, "BATCH_BLOCKS", 6)
    monkeypatch.setattr(limits, "MAX_PART_BLOCKS", 2)
    stage = Stage()
    stage.attach()
    stage.offer(blocks=range(7))
    [grant] = stage.asked_by_peer(claim(blocks=range(7)))
    turns, told = turns_of(stage, monkeypatch), []
    notify = stage.dependencies.worker_port.send
    stage.dependencies.worker_port.send = lambda *what: told.append(list(turns)) or notify(*what)
    stage.request(Cancel(9, "o"))
    assert stage.answers[-1][1].code == ErrorCode.LEASE_BROKEN
    assert isinstance(stage.asked_by_peer(Fence(1, grant.generation))[0], Broken)
    assert turns == [2, 2, "other", "other", 2, 1, "other", "other"]
    assert told[-1].count(1) == 1, "its worker hears of it when all are its own"
    assert released(stage) == [("o", "withdrawn")]
    assert stage.pull(blocks=range(7)) == []


# --- one peer cannot have it all


def test_a_peer_holds_so_many_claims_and_no_more_and_others_hold_theirs(stage, monkeypatch):
    monkeypatch.setattr(limits, "MAX_CLAIMS_PER_PEER", 2)
    for name in ("o", "p"):
        stage.offer(name, consumers=8)
    answers = []
    for number in range(1, 4):
        answers += stage.asked_by_peer(claim(number, offer="op"[number % 2], consumer=f"c{number}"), b"greedy#1")
    assert [getattr(answer, "code", "granted") for answer in answers] == ["granted"] * 2 + ["overloaded"]
    assert isinstance(stage.asked_by_peer(claim(1, consumer="d"), b"modest#1")[0], Grant)
    stage.asked_by_peer(Release(1, finished=False), b"greedy#1")
    assert isinstance(stage.asked_by_peer(claim(4, consumer="c4"), b"greedy#2")[0], Grant)


def test_a_peer_has_its_share_of_the_claims_that_wait_whatever_run_or_connection_it_asks_by(stage, monkeypatch):
    monkeypatch.setattr(limits, "MAX_CLAIMS_WAITING_PER_PEER", 2)
    answers = [stage.asked_by_peer(claim(n, offer=f"o{n}"), b"greedy#%d" % n) for n in range(1, 5)]
    assert [[answer.code for answer in each] for each in answers] == [[], [], ["overloaded"], ["overloaded"]]
    assert stage.asked_by_peer(claim(5), b"modest#1") == []
    stage.asked_by_peer(Release(1, finished=False), b"greedy#1")
    assert stage.asked_by_peer(claim(6, offer="o6"), b"greedy#9") == []
    stage.run(3.0)
    waiting = stage.actors.leases.claims._waiting
    assert len(waiting) == 0
    assert not waiting._of_peer


def test_a_fence_that_comes_twice_is_answered_the_same_however_many_claims_of_another_peer_have_ended(
    stage, monkeypatch
):
    monkeypatch.setattr(stage.actors.leases._tombstones, "_most", 8)
    stage.offer("o", consumers=2)
    stage.offer("p", blocks=(2, 3), consumers=0)
    [grant] = stage.asked_by_peer(claim(1), b"modest#1")
    assert stage.asked_by_peer(Fence(1, grant.generation), b"modest#1") == [Held(1)]
    for number in range(1, 20):
        [other] = stage.asked_by_peer(claim(number, offer="p", blocks=(2, 3)), b"greedy#1")
        assert stage.asked_by_peer(Fence(number, other.generation), b"greedy#1") == [Held(number)]
    assert stage.asked_by_peer(Fence(1, grant.generation), b"modest#1") == [Held(1)]
    assert len(stage.actors.leases.claims._records) <= 8


def test_a_peer_with_a_key_is_known_by_it_whatever_name_it_asks_under(stage, monkeypatch):
    monkeypatch.setattr(limits, "MAX_CLAIMS_WAITING_PER_PEER", 1)
    assert stage.asked_by_peer(claim(1), b"one#1", "aa" * 32) == []
    [refuse] = stage.asked_by_peer(claim(1), b"two#1", "aa" * 32)
    assert refuse.code == ErrorCode.OVERLOADED
    assert stage.asked_by_peer(claim(1), b"one#1b", "bb" * 32) == []


def test_a_renewal_of_claims_that_nobody_holds_has_one_answer_and_leaves_nothing(stage):
    numbers = tuple(range(limits.MAX_RENEWALS))
    for _ in range(2):
        [broken] = stage.asked_by_peer(Renew(numbers))
        assert (type(broken), broken.claims) == (Broken, numbers)
    assert not stage.actors.leases.claims._records
    assert not len(stage.actors.leases._tombstones)


def test_a_peer_hears_once_of_all_its_claims_that_broke_together(stage):
    for name in "ab":
        stage.offer(name)
        for number in range(3):
            stage.asked_by_peer(claim(number + 10 * (name == "b"), offer=name), b"p#1")
            stage.asked_by_peer(claim(number + 10 * (name == "b"), offer=name), b"q#1")
    before = len(stage.answers)
    call(stage.actors.leases.stop)
    stage.run()
    told = [(sender, answer.claims) for sender, answer in stage.answers[before:]]
    assert told == [(b"p#1", (0, 1, 2, 10, 11, 12)), (b"q#1", (0, 1, 2, 10, 11, 12))]


def test_claims_that_lapse_at_one_moment_fill_no_mailbox(stage, monkeypatch):
    stage.offer()
    for number in range(100):
        stage.asked_by_peer(claim(number, consumer=f"c{number}", ttl=1.0))
    monkeypatch.setattr(limits, "MAILBOX_MESSAGES", 10)
    stage.run(6.0)
    assert stage.actors.leases.claims.held == 0


def test_offers_that_end_at_one_moment_fill_no_mailbox(stage, monkeypatch):
    for number in range(100):
        stage.offer(f"o{number}", ttl=30.0 - stage.loop.time())
    monkeypatch.setattr(limits, "MAILBOX_MESSAGES", 30)
    monkeypatch.setattr(limits, "BATCH_ITEMS", 20)
    stage.run(31.0)
    assert [item.offer for item in stage.notified] == [f"o{number}" for number in range(100)]


def held(stage):
    """Blocks and bytes by state, as a scrape has them, where there are any."""
    registry = stage.context.metrics.registry
    found = {}
    for name in ("kvd_held_blocks", "kvd_held_bytes"):
        for hold in Hold:
            if value := registry.get_sample_value(name, {"state": hold}):
                found.setdefault(hold.value, []).append(value)
    return found


def test_blocks_that_stand_for_readers_are_counted_by_state_from_the_offer_to_its_end(stage):
    each = CACHE.spec.groups[0].block_bytes
    assert held(stage) == {}
    stage.offer(ttl=5.0)
    stage.offer("p", blocks=(2,), ttl=60.0)
    assert held(stage) == {"offered": [3, 3 * each]}
    stage.asked_by_peer(claim(ttl=20.0))
    stage.asked_by_peer(claim(2, ttl=20.0))
    assert held(stage) == {"offered": [1, each], "claimed": [2, 2 * each]}
    stage.run(6.0)
    assert held(stage) == {"offered": [1, each], "overdue": [2, 2 * each]}
    stage.asked_by_peer(Release(1, finished=False))
    assert held(stage) == {"offered": [1, each], "overdue": [2, 2 * each]}
    stage.asked_by_peer(Release(2, finished=False))
    assert held(stage) == {"offered": [1, each]}
    stage.request(Cancel(9, "p"))
    assert held(stage) == {}


def test_a_claim_that_is_gone_leaves_blocks_offered_until_their_time_is_over(stage):
    stage.offer(ttl=30.0)
    stage.asked_by_peer(claim())
    stage.asked_by_peer(Release(1, finished=False))
    assert list(held(stage)) == ["offered"]
    stage.run(31.0)
    assert held(stage) == {}


def test_blocks_of_a_pull_are_counted_as_quarantined_from_its_outcome_until_its_read_has_ended(stage):
    each = CACHE.spec.groups[0].block_bytes
    start_reading(stage)
    assert held(stage) == {"pulling": [2, 2 * each]}
    stage.run(5.5)
    assert held(stage) == {"quarantined": [2, 2 * each]}
    stage.read_failed(1)
    assert held(stage) == {}


class Traced:
    """Spans that count."""

    def __init__(self):
        self.outcomes = []

    def claim(self, _claim):
        return self

    def granted(self):
        pass

    def end(self, outcome, _error=None):
        self.outcomes.append(outcome)


def test_spans_of_readers_that_settle_after_their_offer_has_ended_are_ended(stage):
    stage.context.spans = traced = Traced()
    [offered] = stage.offer()
    [rank] = ticket.decode(offered.ticket).ranks
    stage.request(Cancel(3, "o"))
    parent = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    for number in range(5):
        late = claim(number, generation=rank.generation, traceparent=parent)
        assert stage.asked_by_peer(Settle((Fence(number, rank.generation, late),))) == [Settled((number,))]
    assert traced.outcomes == ["broken"] * 5
    assert not stage.actors.leases.claims._records
