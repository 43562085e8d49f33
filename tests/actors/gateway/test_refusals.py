"""Requests without permission get nothing, change nothing and are counted: 1,000 attempts of each kind."""

import os

import pytest
import structlog

from kvd import limits
from kvd.actors.gateway.admission import Rule
from kvd.bench.spec import flat_spec
from kvd.protocol.codec import encode
from kvd.protocol.peer import Broken, Claim, Fence, Grant, Held
from kvd.protocol.ticket import Ticket, TicketRank, proof
from kvd.protocol.types import Span
from kvd.protocol.worker import Attach, Attached, Error, Offer, Offered, Pull, Refused, Status, StatusRequest
from tests.actors.lone import Lone
from tests.simulator.virtual import fleet

STRANGER = 1001
ATTEMPTS = 1000
SECRET = b"a lease's secret"
SPANS = (Span(0, 0, (3).to_bytes(4, "little")),)


def offer(name, call=1):
    return encode(Offer(call, name, 16, SPANS, 60.0, SECRET))


def refused(socket, code):
    labels = {"socket": socket, "code": code}
    return fleet._METRICS.registry.get_sample_value("kvd_requests_refused_total", labels) or 0.0


def test_another_user_with_a_stolen_session_id_gets_no_word_and_changes_nothing():
    lone = Lone()
    session = lone.worker("prefill")
    before = refused("worker", "not_permitted")
    with structlog.testing.capture_logs() as logs:
        for number in range(ATTEMPTS):
            lone.say(session, offer(f"theft-{number}"), uid=STRANGER)
            if number % 100 == 0:
                assert lone.heard(session) == []
    assert lone.heard(session) == []
    assert refused("worker", "not_permitted") - before == ATTEMPTS
    assert [(entry["owner"], entry["uid"]) for entry in logs] == [(1000, STRANGER)]
    lone.say(session, offer("mine"))
    assert isinstance(lone.heard(session)[0], Offered)


def test_a_session_id_that_was_never_given_is_not_attached():
    lone = Lone()
    lone.worker("prefill")
    before = refused("worker", "not_attached")
    with structlog.testing.capture_logs() as logs:
        for _ in range(ATTEMPTS):
            guess = os.urandom(16)
            lone.say(guess, offer("guess"))
            (answer,) = lone.heard(guess)
            assert (type(answer), answer.code) == (Error, "not_attached")
    assert refused("worker", "not_attached") - before == ATTEMPTS
    assert [entry["event"] for entry in logs] == ["message of no session"]


def test_another_user_may_not_attach_under_any_name():
    lone = Lone()
    lone.worker("prefill")
    number = lone.connect(STRANGER, STRANGER)
    before = refused("session", "not_permitted")
    with structlog.testing.capture_logs() as logs:
        for attempt in range(ATTEMPTS):
            answer = lone.attach(number, "prefill" if attempt % 2 else f"pool-{attempt}")
            assert (type(answer), answer.code) == (Refused, "not_permitted")
    assert refused("session", "not_permitted") - before == ATTEMPTS
    assert [(entry["event"], entry["uid"]) for entry in logs] == [("attach not permitted", STRANGER)]


def test_a_user_with_a_rule_cannot_take_the_pool_of_another_even_when_it_is_free():
    lone = Lone((Rule(pools=("*",), uid=STRANGER),))
    number = lone.connect()
    assert isinstance(lone.attach(number, "prefill"), Attached)
    thief = lone.connect(STRANGER)
    for _ in range(2):
        answer = lone.attach(thief, "prefill")
        assert answer.code == "not_permitted"
        assert "belongs to user 1000" in answer.text
        lone.hang_up(number)
        lone.run()


def test_the_pools_of_one_user_stay_within_its_quota():
    lone = Lone((Rule(pools=("*",), uid=STRANGER, max_bytes=600),))
    assert isinstance(lone.attach(lone.connect(STRANGER), "a"), Attached)
    assert isinstance(lone.attach(lone.connect(STRANGER), "b"), Attached)
    answer = lone.attach(lone.connect(STRANGER), "c")
    assert answer.code == "not_permitted"
    assert "256 bytes for 'c' and 512 in other pools of user 1001 are above its quota of 600" in answer.text
    assert isinstance(lone.attach(lone.connect(), "of-another-user"), Attached)


def test_a_replayed_offer_is_a_duplicate():
    lone = Lone()
    session = lone.worker("prefill")
    lone.say(session, offer("r"))
    assert isinstance(lone.heard(session)[0], Offered)
    for _ in range(ATTEMPTS):
        lone.say(session, offer("r"))
    answers = lone.heard(session)
    assert [answer.code for answer in answers] == ["duplicate_request"] * ATTEMPTS


def test_replayed_claims_and_fences_of_a_peer_are_answered_as_before_and_nobody_elses():
    lone = Lone()
    session = lone.worker("prefill")
    lone.say(session, offer("r"))
    lone.run()
    claim = encode(Claim(1, "prefill", "r", 0, 0, proof(SECRET, "prefill", "r", 16, SPANS), "c", 0, 2, 5.0))
    lone.ask(b"peer#1", claim)
    (grant,) = lone.heard(b"peer#1")
    assert isinstance(grant, Grant)
    fence = encode(Fence(1, grant.generation))
    for _ in range(ATTEMPTS // 2):
        lone.ask(b"thief#1", fence)
        lone.ask(b"peer#1", claim)
    assert set(map(type, lone.heard(b"thief#1"))) == {Broken}
    assert set(lone.heard(b"peer#1")) == {grant}
    for _ in range(ATTEMPTS):
        lone.ask(b"peer#1", fence)
    assert set(map(type, lone.heard(b"peer#1"))) == {Held}


def test_a_user_that_attaches_too_often_is_told_to_wait_and_others_are_not():
    lone = Lone((Rule(pools=("*",), uid=STRANGER),))
    number = lone.connect()
    codes = [getattr(lone.attach(number, f"p{n}"), "code", "") for n in range(2)]
    assert codes == ["", "wrong_state"]
    codes = []
    for _ in range(4 * limits.MAX_WORKERS):
        hammer = lone.connect(STRANGER)
        lone.session_frame(hammer, encode(Attach("a/b", bytes(16), b"no spec")))
        lone.run(0.011)
        codes += [answer.code for answer in lone.told.pop(hammer)]
        lone.hang_up(hammer)
    assert codes.count("overloaded") > limits.MAX_WORKERS
    assert isinstance(lone.attach(lone.connect(), "calm"), Attached)
    lone.run(60.0)
    assert isinstance(lone.attach(lone.connect(STRANGER), "later"), Attached)


@pytest.mark.parametrize("kind", ["offers", "statuses"])
def test_a_worker_that_asks_too_often_is_told_to_slow_down_and_others_are_not(kind):
    lone = Lone()
    loud, calm = lone.worker("loud"), lone.worker("calm")
    attempts = 2 * limits.MAX_REQUESTS_PER_WORKER if kind == "offers" else 4 * limits.MAX_STATUSES_PER_SECOND
    for number in range(attempts):
        lone.say(loud, offer("same", number) if kind == "offers" else encode(StatusRequest(number)))
    codes = [getattr(answer, "code", "") for answer in lone.heard(loud)]
    assert len(codes) == attempts
    assert codes.count("overloaded") > attempts // 3
    lone.say(calm, encode(StatusRequest(1)))
    assert isinstance(lone.heard(calm)[0], Status)


def test_open_offers_are_bounded_for_each_worker_by_itself():
    lone = Lone()
    hoarder, other = lone.worker("hoarder"), lone.worker("other")
    for number in range(limits.MAX_REQUESTS_PER_WORKER):
        lone.say(hoarder, offer(f"r{number}"))
    assert {type(answer) for answer in lone.heard(hoarder)} == {Offered}
    lone.run(1.0)
    lone.say(hoarder, offer("one too many"))
    (answer,) = lone.heard(hoarder)
    assert (answer.code, answer.text) == (
        "overloaded",
        "4096 offers of this worker stand, the bound; wait until some are released",
    )
    lone.say(other, offer("mine"))
    assert isinstance(lone.heard(other)[0], Offered)


@pytest.mark.parametrize(
    ("bound", "text"),
    [
        (
            "MAX_RANKS_PER_WORKER",
            "with this one 12 producer ranks of this worker's pulls would be open, the bound is 10",
        ),
        ("MAX_TICKET_BYTES_PER_WORKER", "bytes of tickets of this worker's pulls would be open, the bound is"),
    ],
)
def test_what_the_tickets_of_open_pulls_take_is_bounded_for_each_worker_by_itself(monkeypatch, bound, text):
    lone = Lone()
    hoarder, other = lone.worker("hoarder"), lone.worker("other")
    ranks = tuple(TicketRank("d1", f"sim://d{number}", 0, "p", "o", 0, SECRET) for number in range(1, 5))
    ticket = Ticket(16, ranks, (SPANS,)).encode()
    size = len(ticket) + limits.SPAN_BYTES * len(SPANS)
    monkeypatch.setattr(limits, bound, 10 if bound == "MAX_RANKS_PER_WORKER" else 2 * size + 1)

    def pull(session, name):
        lone.say(session, encode(Pull(1, name, ticket, (), 2.0)))
        return [answer.text for answer in lone.heard(session) if isinstance(answer, Error)]

    assert pull(hoarder, "a") == pull(hoarder, "b") == []
    (refusal,) = pull(hoarder, "c")
    assert text in refusal
    assert pull(other, "mine") == []
    lone.run(2.0)
    lone.heard(hoarder)
    assert pull(hoarder, "c") == []


def test_tickets_of_many_small_spans_count_by_what_they_take_in_memory_and_not_by_their_text():
    lone = Lone()
    session = lone.worker("hoarder")
    rank = TicketRank("d1", "sim://d1", 0, "p", "o", 0, SECRET)
    many = tuple(Span(0, 0, b"") for _ in range(limits.MAX_GROUPS))
    lists = limits.MAX_TICKET_SPANS // limits.MAX_GROUPS
    ticket = Ticket(16, (rank,), (many,) * lists).encode()
    fit = limits.MAX_TICKET_BYTES_PER_WORKER // (len(ticket) + limits.SPAN_BYTES * limits.MAX_TICKET_SPANS)
    for number in range(fit):
        lone.say(session, encode(Pull(1, f"p{number}", ticket, (), 60.0)))
    assert [answer for answer in lone.heard(session) if isinstance(answer, Error)] == []
    lone.say(session, encode(Pull(1, "one too many", ticket, (), 60.0)))
    (refusal,) = [answer for answer in lone.heard(session) if isinstance(answer, Error)]
    assert "bytes of tickets of this worker's pulls would be open" in refusal.text
    assert fit * len(ticket) < limits.MAX_TICKET_BYTES_PER_WORKER / 10


def test_sessions_that_say_nothing_are_closed():
    lone = Lone()
    numbers = [lone.connect(STRANGER) for _ in range(limits.MAX_SESSIONS_PER_USER)]
    full = lone.connect(STRANGER)
    assert lone.heard(full)[0].code == "overloaded"
    lone.run(limits.SESSION_IDLE_SECONDS)
    assert [lone.heard(number)[0].code for number in numbers] == ["deadline"] * len(numbers)
    assert lone.attach(lone.connect(STRANGER), "pool").code == "not_permitted"


def test_other_users_can_take_neither_each_others_places_nor_the_last_ones():
    lone = Lone()
    for _ in range(limits.MAX_SESSIONS_PER_USER):
        lone.connect(STRANGER)
    for number in range(limits.MAX_STRANGERS):
        lone.connect(STRANGER + 1 + number % 8)
    assert isinstance(lone.attach(lone.connect(), "own"), Attached)
    assert isinstance(lone.attach(lone.connect(0), "root"), Attached)
    assert len(lone.daemon.actors.gateway.connections._by_number) == limits.MAX_STRANGERS + 2


def test_sessions_without_a_pool_share_their_users_statuses():
    lone = Lone()
    numbers = [lone.connect(STRANGER) for _ in range(10)]
    for _ in range(100):
        for number in numbers:
            lone.session_frame(number, encode(StatusRequest(1)))
    answers = [answer for number in numbers for answer in lone.heard(number)]
    assert sum(isinstance(answer, Status) for answer in answers) <= 3 * limits.MAX_INQUIRIES_PER_SECOND
    calm = lone.connect()
    lone.session_frame(calm, encode(StatusRequest(1)))
    assert isinstance(lone.heard(calm)[0], Status)


@pytest.mark.parametrize("socket", ["session", "requests"])
def test_sessions_with_a_pool_share_their_users_statuses_too(socket):
    lone = Lone((Rule(pools=("*",), uid=STRANGER),))
    numbers = [lone.connect(STRANGER) for _ in range(10)]
    sessions = [lone.attach(number, f"w{number}").session for number in numbers]
    for _ in range(100):
        for number, session in zip(numbers, sessions, strict=True):
            if socket == "session":
                lone.session_frame(number, encode(StatusRequest(1)))
            else:
                lone.say(session, encode(StatusRequest(1)), STRANGER)
    answers = [answer for whom in (numbers if socket == "session" else sessions) for answer in lone.heard(whom)]
    codes = [getattr(answer, "code", "") for answer in answers]
    assert len(codes) == 1000
    assert sum(isinstance(answer, Status) for answer in answers) <= 3 * limits.MAX_INQUIRIES_PER_SECOND
    assert codes.count("overloaded") >= 1000 - 3 * limits.MAX_INQUIRIES_PER_SECOND
    calm = lone.worker("calm")
    lone.say(calm, encode(StatusRequest(1)))
    assert isinstance(lone.heard(calm)[0], Status)


def test_a_successor_is_held_against_the_quota_and_its_predecessors_pool_is_kept():
    lone = Lone((Rule(pools=("*",), uid=STRANGER, max_bytes=4096),))
    small, large = flat_spec(16, 16).encode(), flat_spec(16, 1 << 20).encode()

    def attach(spec, instance):
        number = lone.connect(STRANGER, STRANGER)
        lone.session_frame(number, encode(Attach("a", instance, spec)))
        lone.run(1.5)
        return number, lone.heard(number)[0]

    number, first = attach(small, b"1" * 16)
    lone.hang_up(number)
    _, refused_successor = attach(large, b"2" * 16)
    assert (refused_successor.code, "quota of 4096" in refused_successor.text) == ("not_permitted", True)
    _, back = attach(small, b"1" * 16)
    assert (back.kept, back.tenancy) == (True, first.tenancy)


def test_one_user_has_so_many_pools():
    lone = Lone()
    for number in range(limits.MAX_POOLS_PER_USER):
        connection = lone.connect()
        assert isinstance(lone.attach(connection, f"pool-{number}"), Attached)
    assert lone.attach(lone.connect(), "one-more").code == "overloaded"
