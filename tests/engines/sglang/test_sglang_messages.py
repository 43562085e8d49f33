"""What engines say to each other, and what comes from others at their port."""

import pytest

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


def test_a_message_is_read_as_it_was_sent() -> None:
    assert decode(encode(Abandoned(3, bytes(16), "why"))) == Abandoned(3, bytes(16), "why")
