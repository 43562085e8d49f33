"""What engines say to each other, and what comes from others at their port."""

import msgspec
import pytest

from kvd import limits
from kvd.engines.sglang.messages import Abandoned, decode, encode
from kvd.errors import BadRequest

UNREADABLE = {
    "nothing": b"",
    "another kind": b"\x81\xa4kind\xa5other",
    "no text": b"\x82\xa4kind\xa6wanted\xa2\xff\xfe\x01",
    "no text as its kind": b"\x81\xa4kind\xa6\xff\xff\xff\xff\xff\xff",
    "nested": b"\x82\xa1x" + b"\x91" * 100_000 + b"\xc0\xa4kind\xa6wanted",
}


@pytest.mark.parametrize("frame", UNREADABLE.values(), ids=UNREADABLE)
def test_whatever_comes_is_a_message_or_refused(frame: bytes) -> None:
    """Anything else would end the thread that takes messages in."""
    with pytest.raises(BadRequest):
        decode(frame)


@pytest.mark.parametrize("field", [{}, {"kind": "refused", "room": 1, "nonce": bytes(16), "reason": ""}])
def test_what_is_no_message_makes_one_short_line_of_the_log(field: dict[str, object]) -> None:
    """Whoever reaches the port can send any, and msgspec quotes kinds and names of fields as they are."""
    evil = "x\nINFO all is well\x1b[2J" + "x" * 10_000
    with pytest.raises(BadRequest) as refused:
        decode(msgspec.msgpack.encode(field | {evil: 1} if field else {"kind": evil}))
    assert "x?INFO all is well?[2Jx" in refused.value.text
    assert refused.value.text.isprintable()
    assert len(refused.value.text) < 2 * limits.MAX_ERROR_TEXT


def test_a_message_is_read_as_it_was_sent() -> None:
    assert decode(encode(Abandoned(3, bytes(16), "why"))) == Abandoned(3, bytes(16), "why")
