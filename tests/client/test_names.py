"""When the name of a pull or an offer may be used again."""

import pytest

from kvd.client.events import Done, Offered, OfferRefused
from kvd.errors import BadRequest, ErrorCode, Unavailable
from kvd.protocol import codec
from kvd.protocol import worker as wire
from tests.client.test_core import BLOCKS, attached, batch, connected, pulling, unknown


def test_what_the_daemon_does_not_know_of_an_offer_does_not_count_for_the_next_of_its_name() -> None:
    core = connected()
    core.offer("o", 10, BLOCKS, 60.0, secret=bytes(16))
    core.pull("other", "t", BLOCKS, 60.0, now=0.0)
    core.on_disconnected(Unavailable(ErrorCode.DAEMON_LOST, "lost"))
    core.on_attached(attached())
    unknown(core, upcoming=3)  # two notifications are on the way, the first of which ends the offer
    core.on_frame(batch(1, wire.Released("o", "expired")), now=0.0)
    core.take_events()
    offer = codec.worker_requests.decode(core.offer("o", 10, BLOCKS, 60.0, secret=bytes(16)))
    core.on_frame(batch(2, wire.Done("other")), now=0.0)
    assert core.take_events() == [Done("other")]
    core.on_frame(codec.encode(wire.Offered(offer.call, "ticket")), now=0.0)
    assert core.take_events() == [Offered("o", "ticket")]


@pytest.mark.parametrize("again", ["pull", "offer"])
def test_a_name_is_free_when_its_end_was_told(again: str) -> None:
    def use() -> None:
        if again == "pull":
            core.pull("r", "t", BLOCKS, 60.0, now=0.0)
        else:
            core.offer("r", 10, BLOCKS, 60.0, secret=bytes(16))

    core = pulling("r")
    core.on_frame(batch(1, wire.Done("r")), now=0.0)
    with pytest.raises(BadRequest, match=r"'r' names a pull or offer of which poll\(\) or offer\(\) has") as caught:
        use()
    assert caught.value.code is ErrorCode.DUPLICATE_REQUEST
    assert core.take_events() == [Done("r")]
    use()


def test_a_name_is_not_free_while_its_answer_waits_for_who_asked() -> None:
    core = connected()

    def offer() -> bytes:
        return core.offer("o", 10, BLOCKS, 60.0, secret=b"s" * 16)

    call = codec.worker_requests.decode(offer()).call
    core.events.await_answer("o")
    core.on_frame(codec.encode(wire.Error(call, "bad_blocks", "not yours")), now=0.0)
    with pytest.raises(BadRequest, match="more to tell") as caught:
        offer()
    assert caught.value.code is ErrorCode.DUPLICATE_REQUEST
    assert core.events.take_answer("o") == OfferRefused("o", "bad_blocks", "not yours")
    core.events.end_await("o")
    offer()
