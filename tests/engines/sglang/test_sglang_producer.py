"""The prefill side's half: an offer for what the decode side wants, and when the engine gets its pages back."""

import contextlib
from typing import Any

import pytest

from kvd.client import Blocks, NotExtended, OfferRefused, Released
from kvd.engines.sglang import producer as module
from kvd.engines.sglang.messages import Abandoned, Address, Message, Offered, Refused, Wanted
from kvd.engines.sglang.producer import Producer
from kvd.errors import ErrorCode, KvdError, refusal

ROOM = 7
NONCE = b"n" * 16
PROMPT = 77
"""Its checksum."""
WANTED = Wanted(ROOM, NONCE, 32, "decode", 5)


class Client:
    def __init__(self) -> None:
        self.offers: dict[str, tuple[Blocks, ...]] = {}
        self.complete: list[int] = []
        """Tokens that offers which grow were said to have."""
        self.closed: set[str] = set()
        self.cancelled: list[str] = []
        self.away = False

    def offer_nowait(self, name: str, *, blocks: tuple[Blocks, ...], **_: Any) -> None:
        self._check()
        self.offers[name] = blocks

    def open_offer_nowait(self, name: str, **_: Any) -> None:
        self._check()
        self.offers[name] = ()

    def extend_offer(self, name: str, *, tokens: int, blocks: tuple[Blocks, ...]) -> None:
        self._check()
        self.offers[name] += blocks
        self.complete.append(tokens)

    def close_offer(self, name: str, *, tokens: int, blocks: tuple[Blocks, ...]) -> None:
        self.extend_offer(name, tokens=tokens, blocks=blocks)
        self.closed.add(name)

    def ticket(self, name: str, *_: Any) -> str:
        return f"ticket of {name}"

    def growing_ticket(self, name: str, _: bytes) -> str:
        return f"growing ticket of {name}"

    def _check(self) -> None:
        if self.away:
            raise refusal(ErrorCode.DAEMON_LOST, "away")

    def cancel(self, name: str) -> None:
        self._check()
        self.cancelled.append(name)

    @property
    def offer(self) -> str:
        (name,) = self.offers
        return name


class Engine:
    def __init__(self, client: Client) -> None:
        self.client = client
        self.heard: list[tuple[Any, ...]] = []
        self.told: list[Message] = []
        self.filled: dict[int, int] = {}

    def ready(self, room: int, prefix: int) -> None:
        self.heard.append(("ready", room, prefix))

    def sent(self, room: int) -> None:
        self.heard.append(("sent", room))

    def failed(self, room: int, reason: str) -> None:
        self.heard.append(("failed", room, reason))

    def fill(self, record: int, aux_index: int) -> None:
        self.filled[record] = aux_index

    def tell(self, engine: Address, message: Message) -> None:
        assert engine == ("decode", 5)
        self.told.append(message)

    def cancel(self, offer: str) -> None:
        with contextlib.suppress(KvdError):
            self.client.cancel(offer)


class Side:
    def __init__(self) -> None:
        self.client = Client()
        self.engine = Engine(self.client)
        self.producer = Producer(self.client, self.engine, offer_ttl=1.0)

    def send(self) -> None:
        self.producer.send(ROOM, [3, 4], tokens=60, first=2, aux_index=9, prompt=PROMPT)

    def offered(self) -> "Side":
        self.producer.told(WANTED)
        self.producer.expect(ROOM)
        self.send()
        return self


def records_left(side: Side) -> set[int]:
    """Those that as many requests get as there are records."""
    before = set(side.client.offers)
    for number in range(100, 1124):
        side.producer.told(Wanted(number, NONCE, 0, "decode", 5))
        side.producer.expect(number)
        side.producer.send(number, [1], tokens=1, first=0, aux_index=number, prompt=PROMPT)
    return {blocks[-1].ids[0] for name, blocks in side.client.offers.items() if name not in before}


@pytest.fixture
def side() -> Side:
    return Side()


@pytest.mark.parametrize("wanted_first", [True, False])
def test_a_request_is_ready_when_both_the_engine_and_the_decode_side_have_it(side: Side, wanted_first: bool) -> None:
    steps = [lambda: side.producer.told(WANTED), lambda: side.producer.expect(ROOM)]
    first, second = steps if wanted_first else reversed(steps)
    first()
    assert side.engine.heard == []
    second()
    assert side.engine.heard == [("ready", ROOM, 32)]


def test_what_was_computed_is_offered_with_its_record_and_the_ticket_goes_to_who_wanted_it(side: Side) -> None:
    side.offered()
    pages, record = side.client.offers[side.client.offer]
    assert pages == Blocks(0, 2, [3, 4])
    assert side.engine.filled == {record.ids[0]: 9}
    assert side.engine.told == [Offered(ROOM, NONCE, f"ticket of {side.client.offer}", PROMPT)]


def test_a_request_of_which_the_decode_side_has_all_pages_is_offered_with_its_record_alone(side: Side) -> None:
    side.producer.told(WANTED)
    side.producer.expect(ROOM)
    side.producer.send(ROOM, [], tokens=32, first=2, aux_index=9, prompt=PROMPT)
    (record,) = side.client.offers[side.client.offer]
    assert record.group == 1


def test_a_request_is_sent_when_its_offer_has_been_read(side: Side) -> None:
    side.offered().producer.on_event(Released(side.client.offer, "read"))
    assert side.engine.heard[-1] == ("sent", ROOM)


@pytest.mark.parametrize("reason", ["expired", "withdrawn", "shutdown", "daemon lost"])
def test_a_request_whose_offer_ends_unread_has_failed_on_both_sides(side: Side, reason: str) -> None:
    side.offered().producer.on_event(Released(side.client.offer, reason))
    assert side.engine.heard[-1][:2] == ("failed", ROOM)
    assert isinstance(side.engine.told[-1], Refused)


def test_a_refused_offer_fails_the_request_on_both_sides(side: Side) -> None:
    side.offered().producer.on_event(OfferRefused(side.client.offer, "overloaded", "full"))
    assert side.engine.heard[-1][:2] == ("failed", ROOM)
    assert isinstance(side.engine.told[-1], Refused)


def test_a_daemon_that_is_away_fails_the_request_on_both_sides(side: Side) -> None:
    side.client.away = True
    side.offered()
    assert side.engine.heard[-1][:2] == ("failed", ROOM)
    assert isinstance(side.engine.told[-1], Refused)


@pytest.mark.parametrize("who", ["engine", "decode side"])
def test_an_abandoned_request_has_failed_only_when_its_offer_has_ended(side: Side, who: str) -> None:
    side.offered()
    if who == "engine":
        side.producer.abandon(ROOM, "aborted")
    else:
        side.producer.told(Abandoned(ROOM, NONCE, "aborted"))
    assert side.client.cancelled == [side.client.offer]
    assert side.engine.heard == [("ready", ROOM, 32)]
    side.producer.on_event(Released(side.client.offer, "withdrawn"))
    assert side.engine.heard[-1][:2] == ("failed", ROOM)


def test_an_abandoned_request_whose_daemon_is_away_still_waits_for_the_end_of_its_offer(side: Side) -> None:
    side.offered()
    side.client.away = True
    side.producer.abandon(ROOM, "aborted")
    assert side.engine.heard == [("ready", ROOM, 32)]
    side.producer.on_event(Released(side.client.offer, "daemon lost"))
    assert side.engine.heard[-1] == ("failed", ROOM, "aborted")


def test_a_request_that_is_abandoned_before_it_is_computed_fails_at_once_and_is_never_offered(side: Side) -> None:
    side.producer.told(WANTED)
    side.producer.expect(ROOM)
    side.producer.abandon(ROOM, "aborted")
    assert side.engine.heard[-1] == ("failed", ROOM, "aborted")
    assert side.engine.told == [Refused(ROOM, NONCE, "aborted")]
    side.send()
    assert not side.client.offers


def test_a_request_that_the_decode_side_abandons_before_it_came_fails_when_it_comes(side: Side) -> None:
    side.producer.told(WANTED)
    side.producer.told(Abandoned(ROOM, NONCE, "aborted"))
    side.producer.expect(ROOM)
    assert side.engine.heard[-1][:2] == ("failed", ROOM)


def test_a_room_that_was_abandoned_before_its_request_came_may_be_wanted_again(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_UNEXPECTED_ROOMS", 2)
    for attempt in range(9):  # each counts as one room that is yet to come, not more
        nonce = bytes([attempt]) * 16
        side.producer.told(Wanted(ROOM, nonce, 32, "decode", 5))
        side.producer.told(Abandoned(ROOM, nonce, "aborted"))
    side.producer.told(WANTED)
    side.producer.told(Wanted(8, NONCE, 0, "decode", 5))
    side.offered()
    side.producer.expect(8)
    assert side.engine.heard == [("ready", ROOM, 32), ("ready", 8, 0)]
    assert side.engine.told == [Offered(ROOM, NONCE, f"ticket of {side.client.offer}", PROMPT)]


def test_the_other_ranks_hear_that_one_has_abandoned_a_request_that_came_later(ranks: Side) -> None:
    ranks.producer.told(WANTED)
    ranks.producer.told(OTHER)
    ranks.producer.told(Abandoned(ROOM, NONCE, "aborted"))
    assert ranks.engine.told == []
    ranks.producer.expect(ROOM)
    assert Refused(ROOM, OTHER.nonce, "the decode engine has abandoned it: aborted") in ranks.engine.told
    assert ranks.engine.heard == [("failed", ROOM, "the decode engine has abandoned it: aborted")]


def test_the_message_of_an_earlier_request_of_the_room_abandons_nothing(side: Side) -> None:
    side.offered().producer.told(Abandoned(ROOM, b"o" * 16, "aborted"))
    assert not side.client.cancelled


def test_a_dropped_request_is_refused_to_the_decode_side(side: Side) -> None:
    side.producer.told(WANTED)
    side.producer.expect(ROOM)
    side.producer.forget(ROOM)
    assert isinstance(side.engine.told[-1], Refused)


def test_rooms_that_no_request_comes_for_are_forgotten_the_oldest_first(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_UNEXPECTED_ROOMS", 2)
    for number in range(3):
        side.producer.told(Wanted(number, NONCE, 0, "decode", 5))
    for number in range(3):
        side.producer.expect(number)
    assert side.engine.heard == [("ready", 1, 0), ("ready", 2, 0)]


def test_requests_that_the_engine_has_take_no_places_of_those_that_are_yet_to_come(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_UNEXPECTED_ROOMS", 2)
    for number in range(10):
        side.producer.expect(number)
    side.producer.told(WANTED)
    side.producer.told(Wanted(20, NONCE, 0, "decode", 5))
    side.producer.expect(20)
    assert side.engine.told == []
    assert side.engine.heard[-1] == ("ready", 20, 0)


def test_nothing_is_told_to_places_that_never_wanted_what_this_engine_had(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reaches its port could have it open a socket for each; an honest engine's dropped requests are refused."""
    monkeypatch.setattr(module, "MAX_UNEXPECTED_ROOMS", 2)
    monkeypatch.setattr(side.engine, "tell", lambda engine, message: side.engine.told.append((engine[0], message)))
    for number in range(9):
        side.producer.told(Wanted(number, NONCE, 0, "made-up", 1 + number))
    side.producer.told(Wanted(9, NONCE, 0, "made-up", 5))
    side.producer.told(Abandoned(9, NONCE, "for a socket"))
    assert side.engine.told == []
    side.producer.told(WANTED)
    side.producer.expect(ROOM)
    for number in range(10, 15):
        side.producer.told(Wanted(number, NONCE, 0, "decode", 5))
    refused = [(host, message.room) for host, message in side.engine.told if isinstance(message, Refused)]
    assert refused[0] == ("decode", 10)
    assert len(refused) == len(side.engine.told)


def test_a_record_serves_one_request_at_a_time_and_others_wait(side: Side) -> None:
    total = 1024
    for number in range(total + 1):
        side.producer.told(Wanted(number, NONCE, 0, "decode", 5))
        side.producer.expect(number)
        side.producer.send(number, [1], tokens=1, first=0, aux_index=number, prompt=PROMPT)
    records = [blocks[-1].ids[0] for blocks in side.client.offers.values()]
    assert sorted(records) == list(range(total))
    freed = next(iter(side.client.offers))
    record = side.client.offers[freed][-1].ids[0]
    side.producer.on_event(Released(freed, "read"))
    assert len(side.client.offers) == total + 1
    assert list(side.client.offers.values())[-1][-1].ids[0] == record


def test_any_number_of_requests_that_wait_for_a_record_may_be_abandoned_together(side: Side) -> None:
    for number in range(4096):
        side.producer.told(Wanted(number, NONCE, 0, "decode", 5))
        side.producer.expect(number)
        side.producer.send(number, [1], tokens=1, first=0, aux_index=number, prompt=PROMPT)
    waiting = list(range(len(side.client.offers), 4096))
    for number in waiting:
        side.producer.abandon(number, "aborted")
    side.producer.on_event(Released(next(iter(side.client.offers)), "read"))
    assert [room for what, room, *_ in side.engine.heard if what == "failed"] == waiting


OTHER = Wanted(ROOM, b"m" * 16, 16, "decode", 6)


@pytest.fixture
def ranks(side: Side, monkeypatch: pytest.MonkeyPatch) -> Side:
    """One whose decode engine has two ranks."""
    monkeypatch.setattr(side.engine, "tell", lambda _engine, message: side.engine.told.append(message))
    return side


@pytest.mark.parametrize("late", [False, True])
def test_one_offer_serves_all_ranks_of_the_decode_engine(ranks: Side, late: bool) -> None:
    if not late:
        ranks.producer.told(OTHER)
    ranks.offered()
    if late:
        ranks.producer.told(OTHER)
    named = f"ticket of {ranks.client.offer}"
    told = {message.nonce: message for message in ranks.engine.told}
    assert told == {nonce: Offered(ROOM, nonce, named, PROMPT) for nonce in (NONCE, OTHER.nonce)}


def test_what_any_rank_of_the_decode_engine_lacks_is_sent(ranks: Side) -> None:
    ranks.producer.told(WANTED)
    ranks.producer.expect(ROOM)
    ranks.producer.told(OTHER)
    assert ranks.engine.heard[-1] == ("ready", ROOM, 16)


def test_what_one_rank_abandons_is_refused_to_the_others_whenever_they_want_it(ranks: Side) -> None:
    ranks.producer.told(WANTED)
    ranks.producer.expect(ROOM)
    ranks.producer.told(Abandoned(ROOM, NONCE, "aborted"))
    ranks.producer.told(OTHER)
    assert Refused(ROOM, OTHER.nonce, "the decode engine has abandoned it: aborted") in ranks.engine.told


def test_no_room_has_more_ranks_than_an_engine_may_have(ranks: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RANKS", 2)
    for port in range(1, 9):
        ranks.producer.told(Wanted(ROOM, NONCE, 0, "decode", port))
    ranks.producer.expect(ROOM)
    ranks.send()
    assert len(ranks.engine.told) == 2


GROWS = Wanted(ROOM, NONCE, 32, "decode", 5, grows=True)


class Growing(Side):
    """The decode side has two pages; three more, and a part of a fourth, are computed in three chunks."""

    def begin(self, wanted: Wanted = GROWS) -> "Growing":
        self.producer.told(wanted)
        self.producer.expect(ROOM)
        return self

    def extend(self, *pages: int, tokens: int) -> None:
        self.producer.begin(ROOM, PROMPT)
        self.producer.extend(ROOM, list(pages), tokens=tokens, first=2)

    def grow(self) -> "Growing":
        self.extend(3, tokens=48)
        self.extend(3, 4, 5, tokens=80)
        return self

    def send(self, prompt: int = PROMPT) -> None:
        self.producer.send(ROOM, [3, 4, 5, 6], tokens=90, first=2, aux_index=9, prompt=prompt)


@pytest.fixture
def growing() -> Growing:
    return Growing().begin()


def test_what_is_computed_in_several_chunks_is_offered_with_the_first_and_the_record_comes_with_the_last(
    growing: Growing,
) -> None:
    growing.grow()
    offer = growing.client.offer
    assert growing.engine.told == [Offered(ROOM, NONCE, f"growing ticket of {offer}", PROMPT)]
    assert growing.engine.filled == {}
    growing.send()
    *pages, record = growing.client.offers[offer]
    assert pages == [Blocks(0, 2, [3]), Blocks(0, 3, [4, 5]), Blocks(0, 5, [6])]
    assert growing.client.complete == [48, 80, 90]
    assert growing.engine.filled == {record.ids[0]: 9}
    assert growing.client.closed == {offer}
    growing.producer.on_event(Released(offer, "read"))
    assert growing.engine.heard[-1] == ("sent", ROOM)


def test_nothing_grows_for_who_asks_for_the_whole_ticket() -> None:
    side = Growing().begin(WANTED)
    side.grow()
    assert not side.client.offers
    side.send()
    pages, _ = side.client.offers[side.client.offer]
    assert pages == Blocks(0, 2, [3, 4, 5, 6])
    assert side.engine.told == [Offered(ROOM, NONCE, f"ticket of {side.client.offer}", PROMPT)]


def test_a_daemon_that_is_away_for_the_first_chunks_is_offered_all_at_the_end_as_ranks_with_another_daemon_are(
    growing: Growing,
) -> None:
    growing.client.away = True
    growing.grow()
    growing.client.away = False
    growing.send()
    assert growing.client.offers[growing.client.offer][0] == Blocks(0, 2, [3, 4, 5, 6])
    assert growing.client.closed == {growing.client.offer}
    assert growing.engine.told == [Offered(ROOM, NONCE, f"growing ticket of {growing.client.offer}", PROMPT)]


def test_a_daemon_that_is_away_for_all_chunks_fails_the_request_and_its_record_is_free(growing: Growing) -> None:
    growing.client.away = True
    growing.grow().send()
    assert growing.engine.heard[-1][:2] == ("failed", ROOM)
    assert isinstance(growing.engine.told[-1], Refused)
    growing.client.away = False
    assert len(records_left(growing)) == 1024


@pytest.mark.parametrize("computed", [True, False])
def test_ranks_offer_alike_whether_or_not_kernels_have_ended_when_the_first_part_is_sent(
    growing: Growing, computed: bool
) -> None:
    growing.producer.begin(ROOM, PROMPT)
    if computed:
        growing.producer.extend(ROOM, [3], tokens=48, first=2)
    growing.send()
    assert growing.client.closed == {growing.client.offer}
    assert growing.engine.told == [Offered(ROOM, NONCE, f"growing ticket of {growing.client.offer}", PROMPT)]


@pytest.mark.parametrize("who", ["engine", "decode side"])
def test_a_request_that_is_abandoned_while_it_is_computed_fails_at_once_and_is_never_closed(
    growing: Growing, who: str
) -> None:
    growing.grow()
    if who == "engine":
        growing.producer.abandon(ROOM, "aborted")
    else:
        growing.producer.told(Abandoned(ROOM, NONCE, "aborted"))
    assert growing.engine.heard[-1][:2] == ("failed", ROOM)
    assert growing.client.cancelled == [growing.client.offer]
    growing.extend(3, 4, 5, 6, tokens=96)
    growing.send()
    growing.producer.on_event(Released(growing.client.offer, "withdrawn"))
    assert (growing.client.complete, growing.client.closed) == ([48, 80], set())
    assert len(growing.client.offers) == 1


@pytest.mark.parametrize("reason", ["expired", "daemon lost", "read"])
def test_a_request_whose_offer_ends_while_it_is_computed_has_failed_on_both_sides(
    growing: Growing, reason: str
) -> None:
    growing.grow().producer.on_event(Released(growing.client.offer, reason))
    assert growing.engine.heard[-1][:2] == ("failed", ROOM)
    assert isinstance(growing.engine.told[-1], Refused)
    growing.send()
    assert len(growing.client.offers) == 1


@pytest.mark.parametrize("end", ["refused", "away", "at the close"])
def test_an_offer_that_cannot_grow_fails_the_request(growing: Growing, end: str) -> None:
    growing.grow()
    if end == "refused":
        growing.producer.on_event(NotExtended(growing.client.offer, "bad_blocks", "no"))
    else:
        growing.client.away = True
        growing.send() if end == "at the close" else growing.extend(3, 4, 5, 6, tokens=96)
    growing.client.away = False
    if end == "at the close":
        assert growing.engine.heard[-1][0] == "ready"  # the daemon may have it
        growing.producer.on_event(Released(growing.client.offer, "daemon lost"))
    assert growing.engine.heard[-1][:2] == ("failed", ROOM)
    assert not growing.client.closed


def test_a_prompt_that_is_not_computed_whole_is_not_closed(growing: Growing) -> None:
    growing.grow().send(prompt=PROMPT + 1)
    assert growing.client.cancelled == [growing.client.offer]
    growing.producer.on_event(Released(growing.client.offer, "withdrawn"))
    assert growing.engine.heard[-1] == ("failed", ROOM, "only 90 tokens of the prompt are computed")
    assert not growing.client.closed


def test_the_record_of_an_offer_that_grew_is_free_once_it_has_ended(growing: Growing) -> None:
    growing.grow().send()
    growing.producer.on_event(Released(growing.client.offer, "read"))
    assert len(records_left(growing)) == 1024


def test_a_request_that_the_engine_drops_while_it_is_computed_is_refused_and_its_offer_withdrawn(
    growing: Growing,
) -> None:
    growing.grow().producer.forget(ROOM)
    assert isinstance(growing.engine.told[-1], Refused)
    assert growing.client.cancelled == [growing.client.offer]
    assert growing.engine.heard[-1][0] == "ready"


def test_what_comes_after_the_most_parts_of_an_offer_comes_with_the_last(
    growing: Growing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_PARTS_PER_OFFER", 1)
    growing.grow().send()
    assert growing.client.offers[growing.client.offer][:2] == (Blocks(0, 2, [3]), Blocks(0, 3, [4, 5, 6]))


@pytest.mark.parametrize("dropped", [False, True])
def test_a_request_that_the_decode_side_leaves_while_its_end_waits_for_a_record_has_failed(
    growing: Growing, dropped: bool
) -> None:
    for number in range(100, 1124):
        growing.producer.told(Wanted(number, NONCE, 0, "decode", 5))
        growing.producer.expect(number)
        growing.producer.send(number, [1], tokens=1, first=0, aux_index=1, prompt=PROMPT)
    others = set(growing.client.offers)
    growing.grow().send()
    (offer,) = set(growing.client.offers) - others
    growing.producer.on_event(Released(offer, "read"))
    assert growing.engine.heard[-1][:2] == ("failed", ROOM)
    if dropped:
        growing.producer.forget(ROOM)
    growing.producer.on_event(Released(min(others), "read"))
    assert set(growing.client.offers) == others | {offer}
    assert 9 not in growing.engine.filled.values()
    assert ("sent", ROOM) not in growing.engine.heard
