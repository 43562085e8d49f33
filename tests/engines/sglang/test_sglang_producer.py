"""The prefill side's half: an offer for what the decode side wants, and when the engine gets its pages back."""

from typing import Any

import pytest

from kvd.client import Blocks, OfferRefused, Released
from kvd.engines.sglang import producer as module
from kvd.engines.sglang.messages import Abandoned, Message, Offered, Refused, Wanted
from kvd.engines.sglang.producer import Producer
from kvd.errors import ErrorCode, refusal

ROOM = 7
NONCE = b"n" * 16
PROMPT = 77
"""Its checksum."""
WANTED = Wanted(ROOM, NONCE, 32, "decode", 5)


class Client:
    def __init__(self) -> None:
        self.offers: dict[str, tuple[Blocks, ...]] = {}
        self.cancelled: list[str] = []
        self.away = False

    def offer_nowait(self, name: str, *, blocks: tuple[Blocks, ...], **_: Any) -> None:
        if self.away:
            raise refusal(ErrorCode.DAEMON_LOST, "away")
        self.offers[name] = blocks

    def ticket(self, name: str, *_: Any) -> str:
        return f"ticket of {name}"

    def cancel(self, name: str) -> None:
        if self.away:
            raise refusal(ErrorCode.DAEMON_LOST, "away")
        self.cancelled.append(name)

    @property
    def offer(self) -> str:
        (name,) = self.offers
        return name


class Engine:
    def __init__(self) -> None:
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

    def tell(self, host: str, port: int, message: Message) -> None:
        assert (host, port) == ("decode", 5)
        self.told.append(message)


class Side:
    def __init__(self) -> None:
        self.client, self.engine = Client(), Engine()
        self.producer = Producer(self.client, self.engine, offer_ttl=1.0)

    def send(self) -> None:
        self.producer.send(ROOM, [3, 4], tokens=60, first=2, aux_index=9, prompt=PROMPT)

    def offered(self) -> "Side":
        self.producer.told(WANTED)
        self.producer.expect(ROOM)
        self.send()
        return self


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
    monkeypatch.setattr(side.engine, "tell", lambda host, port, message: side.engine.told.append((host, message)))
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
