"""The decode side's half: a pull when the ticket comes, and never pages back while they may be written to."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from kvd.client import Blocks, Cancelled, Done, Failed, Freed
from kvd.engines.sglang.consumer import Consumer
from kvd.engines.sglang.handoff import FirstToken, Handoff, Params
from kvd.engines.sglang.messages import Abandoned, Address, Message, Offered, Refused, Wanted
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.limits import MAX_RANKS, MAX_TRANSFER_RECORDS
from kvd.protocol import ticket as tickets
from kvd.protocol.ticket import Ticket, TicketRank

ROOM = 7
SOURCE = ("prefill", 4)
PROMPT = 77
"""Its checksum."""
PAGES = (Blocks(0, 2, [3, 4]),)


def ticket(pool: str, tokens: int = 60) -> str:
    rank = TicketRank("prefill", "tcp://10.0.0.1:1", 1, pool, "offer", 0, bytes(16))
    return Ticket(tokens, (rank,), ((),)).encode()


TICKET = ticket("p0")


class Client:
    def __init__(self) -> None:
        self.pulls: dict[str, tuple[Blocks, ...]] = {}
        self.tickets: dict[str, str] = {}
        self.consumers: set[str] = set()
        self.timeouts: list[float] = []
        self.cancelled: list[str] = []
        self.away = False

    def pull(self, name: str, ticket: str, *, blocks: tuple[Blocks, ...], timeout: float, consumer: str) -> None:
        self.timeouts.append(timeout)
        if self.away:
            raise refusal(ErrorCode.DAEMON_LOST, "away")
        self.pulls[name] = blocks
        self.tickets[name] = ticket
        self.consumers.add(consumer)

    def cancel(self, name: str) -> None:
        if self.away:
            raise refusal(ErrorCode.DAEMON_LOST, "away")
        self.cancelled.append(name)

    @property
    def name(self) -> str:
        (name,) = self.pulls
        return name


class Engine:
    def __init__(self, client: Client) -> None:
        self.client = client
        self.heard: list[tuple[Any, ...]] = []
        self.told: list[Message] = []
        self.later: list[Callable[[], None]] = []

    def pulling(self, room: int) -> None:
        self.heard.append(("pulling", room))

    def landed(self, room: int, record: int | FirstToken, aux_index: int) -> None:
        self.heard.append(("landed", room, record, aux_index))

    def failed(self, room: int, reason: str) -> None:
        self.heard.append(("failed", room, reason))

    def call_after(self, kernels: Any, call: Callable[[], None]) -> None:
        self.later.append(call)

    def tell(self, engine: Address, message: Message) -> None:
        assert engine == SOURCE
        self.told.append(message)

    def cancel(self, pull: str) -> None:
        with contextlib.suppress(KvdError):
            self.client.cancel(pull)


class Side:
    def __init__(self) -> None:
        self.client = Client()
        self.engine = Engine(self.client)
        self.consumer = Consumer(self.client, self.engine, "decode", 5, pull_timeout=1.0, growing_timeout=9.0)

    def want(self) -> "Side":
        self.consumer.want(ROOM, (SOURCE,), PAGES, prefix=32, aux_index=9, prompt=PROMPT)
        return self

    @property
    def nonce(self) -> bytes:
        return self.engine.told[0].nonce

    def pulling(self) -> "Side":
        self.want().consumer.told(Offered(ROOM, self.nonce, TICKET, PROMPT))
        return self


@pytest.fixture
def side() -> Side:
    return Side()


def test_the_prefill_side_is_told_what_is_wanted(side: Side) -> None:
    side.want()
    assert side.engine.told == [Wanted(ROOM, side.nonce, 32, "decode", 5, grows=True)]


def test_a_ticket_is_pulled_with_its_record_and_what_landed_is_the_engines(side: Side) -> None:
    side.pulling()
    pages, record = side.client.pulls[side.client.name]
    assert pages == Blocks(0, 2, [3, 4])
    side.consumer.on_event(Done(side.client.name))
    assert side.engine.heard == [("pulling", ROOM), ("landed", ROOM, record.ids[0], 9)]


def test_a_ticket_for_an_earlier_request_of_the_room_is_not_pulled(side: Side) -> None:
    side.want().consumer.told(Offered(ROOM, b"o" * 16, TICKET, PROMPT))
    assert not side.client.pulls


def test_a_second_ticket_is_not_pulled_into_the_same_pages(side: Side) -> None:
    side.pulling().consumer.told(Offered(ROOM, side.nonce, TICKET, PROMPT))
    assert len(side.client.pulls) == 1


def test_a_refused_request_has_failed(side: Side) -> None:
    side.want().consumer.told(Refused(ROOM, side.nonce, "out of memory"))
    assert side.engine.heard[-1][0] == "failed"
    assert "out of memory" in side.engine.heard[-1][2]


def test_a_refusal_during_the_pull_leaves_the_pages_to_the_pull(side: Side) -> None:
    side.pulling().consumer.told(Refused(ROOM, side.nonce, "withdrawn"))
    assert side.engine.heard == [("pulling", ROOM)]
    side.consumer.on_event(Failed(side.client.name, "lease_broken", "withdrawn", quarantined=False, blocks=()))
    assert side.engine.heard[-1][0] == "failed"


def test_a_request_that_is_abandoned_before_its_ticket_fails_at_once_and_is_never_pulled(side: Side) -> None:
    side.want().consumer.abandon(ROOM, "aborted")
    assert side.engine.heard == [("failed", ROOM, "aborted")]
    assert side.engine.told[-1] == Abandoned(ROOM, side.nonce, "aborted")
    side.consumer.told(Offered(ROOM, side.nonce, TICKET, PROMPT))
    assert not side.client.pulls


@pytest.mark.parametrize("away", [False, True])
def test_a_request_that_is_abandoned_during_its_pull_fails_when_the_pull_has_ended(side: Side, away: bool) -> None:
    side.pulling()
    side.client.away = away
    side.consumer.abandon(ROOM, "aborted")
    assert side.engine.heard == [("pulling", ROOM)]
    side.consumer.on_event(Cancelled(side.client.name, quarantined=False, blocks=()))
    assert side.engine.heard[-1] == ("failed", ROOM, "aborted")


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_pages_in_quarantine_are_not_the_engines_before_they_are_freed(side: Side, end: str) -> None:
    side.pulling()
    name = side.client.name
    if end == "failed":
        side.consumer.on_event(Failed(name, "peer_lost", "gone", quarantined=True, blocks=()))
    else:
        side.consumer.abandon(ROOM, "aborted")
        side.consumer.on_event(Cancelled(name, quarantined=True, blocks=()))
    assert side.engine.heard == [("pulling", ROOM)]
    side.consumer.abandon(ROOM, "aborted")
    assert side.engine.heard == [("pulling", ROOM)]
    side.consumer.on_event(Freed(name, blocks=()))
    assert side.engine.heard[-1][0] == "failed"


def test_a_pull_that_is_done_although_its_request_was_abandoned_is_not_the_requests(side: Side) -> None:
    side.pulling().consumer.abandon(ROOM, "aborted")
    side.consumer.on_event(Done(side.client.name))
    assert side.engine.heard[-1] == ("failed", ROOM, "aborted")


def test_a_request_whose_pull_cannot_be_made_has_failed_and_the_prefill_side_hears_so(side: Side) -> None:
    side.client.away = True
    side.pulling()
    assert side.engine.heard[-1][0] == "failed"
    assert isinstance(side.engine.told[-1], Abandoned)


def test_a_prefill_engine_that_is_gone_fails_what_it_has_not_offered_and_nothing_else(side: Side) -> None:
    side.pulling().consumer.lost(ROOM, "gone")
    assert side.engine.heard == [("pulling", ROOM)]
    side.consumer.want(8, (SOURCE,), PAGES, prefix=0, aux_index=1, prompt=PROMPT)
    side.consumer.lost(8, "gone")
    assert side.engine.heard[-1] == ("failed", 8, "gone")


@pytest.mark.parametrize("end", ["lost", "abandon"])
def test_a_request_that_has_failed_before_the_engine_has_pages_for_it_is_never_pulled(side: Side, end: str) -> None:
    getattr(side.consumer, end)(ROOM, "gone")
    assert side.engine.heard == [("failed", ROOM, "gone")]
    side.want()
    assert side.engine.heard == 2 * [("failed", ROOM, "gone")]
    assert side.engine.told == []
    side.consumer.forget(ROOM)
    assert side.pulling().client.pulls  # another request of this room


def test_the_record_of_a_pull_is_not_used_again_before_the_pull_has_ended(side: Side) -> None:
    side.pulling()
    first = side.client.pulls[side.client.name][-1].ids[0]
    for number in range(100, 1124):
        side.consumer.want(number, (SOURCE,), PAGES, prefix=0, aux_index=1, prompt=PROMPT)
        side.consumer.told(Offered(number, side.engine.told[-1].nonce, TICKET, PROMPT))
    records = [blocks[-1].ids[0] for blocks in side.client.pulls.values()]
    assert len(records) == len(set(records)) == 1024
    side.consumer.on_event(Freed(next(iter(side.client.pulls)), blocks=()))
    assert list(side.client.pulls.values())[-1][-1].ids[0] == first


@pytest.mark.parametrize("away", [False, True])
def test_any_number_of_requests_that_wait_for_a_record_may_fail_together(side: Side, away: bool) -> None:
    for number in range(4096):
        side.consumer.want(number, (SOURCE,), PAGES, prefix=0, aux_index=1, prompt=PROMPT)
        side.consumer.told(Offered(number, side.engine.told[-1].nonce, TICKET, PROMPT))
    waiting = range(len(side.client.pulls), 4096)
    side.client.away = away
    for number in () if away else waiting:
        side.consumer.abandon(number, "aborted")
    side.consumer.on_event(Failed(next(iter(side.client.pulls)), "daemon_lost", "gone", quarantined=False, blocks=()))
    assert [room for what, room, *_ in side.engine.heard if what == "failed" and room] == list(waiting)


FIRST = FirstToken(5, -0.25)
HANDED = Handoff(Params(TICKET, PROMPT), FIRST)


def test_what_was_handed_over_is_pulled_without_a_record_and_the_engine_is_told_the_first_token(side: Side) -> None:
    side.consumer.take(ROOM, HANDED, PAGES, aux_index=9)
    assert side.client.pulls == {side.client.name: PAGES}
    side.consumer.on_event(Done(side.client.name))
    assert side.engine.heard == [("pulling", ROOM), ("landed", ROOM, FIRST, 9)]
    assert side.engine.told == []


def test_what_was_handed_over_keeps_its_pages_while_its_aborted_pull_may_write(side: Side) -> None:
    side.consumer.take(ROOM, HANDED, PAGES, aux_index=9)
    side.consumer.abandon(ROOM, "aborted")
    assert side.client.cancelled == [side.client.name]
    assert side.engine.heard == [("pulling", ROOM)]
    side.consumer.on_event(Cancelled(side.client.name, quarantined=True, blocks=()))
    assert side.engine.heard == [("pulling", ROOM)]
    side.consumer.on_event(Freed(side.client.name, blocks=()))
    assert side.engine.heard[1:] == [("failed", ROOM, "aborted")]


def test_what_is_not_wanted_of_another_engine_is_let_go(side: Side) -> None:
    side.consumer.let_go(ROOM, HANDED.params.kvd_ticket)
    assert list(side.client.pulls.values()) == [()]
    side.consumer.on_event(Done(side.client.name))
    assert side.engine.heard == []


def test_a_ticket_of_another_prompt_is_not_pulled(side: Side) -> None:
    side.want().consumer.told(Offered(ROOM, side.nonce, "ticket", PROMPT + 1))
    assert not side.client.pulls
    assert side.engine.heard[-1][0] == "failed"
    assert f"checksum {PROMPT}, the prefill engine's {PROMPT + 1}" in side.engine.heard[-1][2]
    assert isinstance(side.engine.told[-1], Abandoned)


def test_what_an_engine_of_the_same_kind_has_prefilled_is_pulled_with_its_record(side: Side) -> None:
    side.consumer.take(ROOM, Handoff(HANDED.params), PAGES, aux_index=9)
    pages, record = side.client.pulls[side.client.name]
    assert (pages,) == PAGES
    side.consumer.on_event(Done(side.client.name))
    assert side.engine.heard[1:] == [("landed", ROOM, record.ids[0], 9)]


class Running:
    """Kernels that an earlier step was given."""

    def __init__(self) -> None:
        self.ended = False

    def query(self) -> bool:
        return self.ended

    def record(self, *stream: object) -> None: ...


def test_nothing_is_pulled_into_pages_to_which_an_earlier_steps_kernels_may_write(side: Side) -> None:
    kernels = Running()
    side.consumer.take(ROOM, HANDED, PAGES, aux_index=9, after=kernels)
    assert (side.client.pulls, side.engine.heard) == ({}, [])
    kernels.ended = True
    (call,) = side.engine.later
    call()
    assert side.client.pulls == {side.client.name: PAGES}


class Lost(Running):
    """Of the GPU's context nothing is known any more."""

    def query(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("aborted", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_a_request_fails_and_gives_its_record_back_if_of_an_earlier_steps_kernels_nothing_is_known(
    side: Side, aborted: bool, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels: Running = Running() if later else Lost()
    side.consumer.take(ROOM, Handoff(HANDED.params), PAGES, aux_index=9, after=kernels)
    if later:
        if aborted:
            side.consumer.abandon(ROOM, "aborted")
        monkeypatch.setattr(kernels, "query", Lost().query)
        (call,) = side.engine.later
        call()
    ((what, room, reason),) = side.engine.heard
    assert (what, room) == ("failed", ROOM)
    assert ("aborted" if aborted and later else "illegal memory access") in reason
    assert list(side.client.pulls.values()) == [()]  # let go
    assert len(side.consumer._records._free) == MAX_TRANSFER_RECORDS


def test_a_request_that_is_aborted_before_those_kernels_end_is_let_go_then(side: Side) -> None:
    kernels = Running()
    side.consumer.take(ROOM, HANDED, PAGES, aux_index=9, after=kernels)
    side.consumer.abandon(ROOM, "aborted")
    assert side.engine.heard == [("failed", ROOM, "aborted")]
    kernels.ended = True
    (call,) = side.engine.later
    call()
    assert side.client.pulls == {side.client.name: ()}
    side.consumer.on_event(Done(side.client.name))
    assert len(side.engine.heard) == 1


def test_a_room_of_which_the_engine_cannot_take_what_has_landed_can_still_fail(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    def landed(*_: object) -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr(side.engine, "landed", landed)
    side.pulling()
    with pytest.raises(RuntimeError):
        side.consumer.on_event(Done(side.client.name))
    side.consumer.abandon(ROOM, "a defect")
    assert side.engine.heard[-1] == ("failed", ROOM, "a defect")
    assert not side.client.cancelled


RANKS = (SOURCE, ("prefill", 5))


@pytest.fixture
def ranks(side: Side, monkeypatch: pytest.MonkeyPatch) -> Side:
    """One whose prefill engine has two ranks."""
    monkeypatch.setattr(side.engine, "tell", lambda _engine, message: side.engine.told.append(message))
    side.consumer.want(ROOM, RANKS, PAGES, prefix=32, aux_index=9, prompt=PROMPT)
    return side


def offered(side: Side, rank: int, what: str) -> None:
    side.consumer.told(Offered(ROOM, side.engine.told[rank].nonce, what, PROMPT))


def test_a_prompt_of_several_ranks_is_pulled_when_all_have_offered_it_with_a_ticket_of_all_in_their_order(
    ranks: Side,
) -> None:
    assert len({message.nonce for message in ranks.engine.told}) == 2
    offered(ranks, 1, ticket("p1"))
    offered(ranks, 1, ticket("p1"))
    assert not ranks.client.pulls
    offered(ranks, 0, ticket("p0"))
    named = tickets.decode(ranks.client.tickets[ranks.client.name]).ranks
    assert [rank.pool for rank in named] == ["p0", "p1"]


def test_all_ranks_of_an_engine_are_one_consumer(ranks: Side) -> None:
    others = Side()
    for side in (ranks, others.want()):
        for rank in range(len(side.engine.told)):
            offered(side, rank, ticket(f"p{rank}"))
    assert ranks.client.consumers == others.client.consumers != {""}


def test_what_one_rank_refuses_the_others_need_not_send(ranks: Side) -> None:
    nonces = [message.nonce for message in ranks.engine.told]
    ranks.consumer.told(Refused(ROOM, nonces[1], "out of memory"))
    assert ranks.engine.heard[-1][0] == "failed"
    assert [(type(message), message.nonce) for message in ranks.engine.told[2:]] == [(Abandoned, n) for n in nonces]
    offered(ranks, 0, ticket("p0"))
    assert not ranks.client.pulls


def test_tickets_of_ranks_that_do_not_fit_each_other_are_not_pulled(ranks: Side) -> None:
    offered(ranks, 0, ticket("p0", tokens=60))
    offered(ranks, 1, ticket("p1", tokens=61))
    assert not ranks.client.pulls
    assert "differ in tokens" in ranks.engine.heard[-1][2]


def test_tickets_that_name_too_many_ranks_together_fail_their_room(ranks: Side) -> None:
    for rank, pool in enumerate(("p0", "p1")):
        made = TicketRank("prefill", "tcp://10.0.0.1:1", 1, pool, "offer", 0, bytes(16))
        offered(ranks, rank, Ticket(60, (made,) * MAX_RANKS, ((),)).encode())
    assert not ranks.client.pulls
    assert "name 2048 ranks" in ranks.engine.heard[-1][2]
    assert isinstance(ranks.engine.told[-1], Abandoned)


GROWING = tickets.growing(daemon="prefill", address="tcp://10.0.0.1:1", pool="p0", offer="offer", secret=bytes(16))


def test_what_is_still_computed_is_pulled_for_as_long_as_the_engine_would_have_waited_for_its_ticket(
    side: Side,
) -> None:
    side.want().consumer.told(Offered(ROOM, side.nonce, GROWING, PROMPT))
    assert side.client.pulls[side.client.name][0] == PAGES[0]
    assert side.client.timeouts == [9.0]


def test_what_a_prefill_engine_that_does_not_answer_has_yet_to_compute_is_given_up(side: Side) -> None:
    side.want().consumer.told(Offered(ROOM, side.nonce, GROWING, PROMPT))
    side.consumer.lost(ROOM, "gone")
    assert side.client.cancelled == [side.client.name]
    assert side.engine.heard == [("pulling", ROOM)]
    side.consumer.on_event(Cancelled(side.client.name, quarantined=False, blocks=()))
    assert side.engine.heard[-1] == ("failed", ROOM, "gone")


def test_what_the_engine_has_dropped_is_never_pulled(side: Side) -> None:
    side.want().consumer.forget(ROOM)
    assert isinstance(side.engine.told[-1], Abandoned)
    side.consumer.told(Offered(ROOM, side.nonce, TICKET, PROMPT))
    assert not side.client.pulls
