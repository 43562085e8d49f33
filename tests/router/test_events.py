"""What the beginning of a stream has said."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.router import limits
from kvd.router.events import Beginning, Errors, Said


def chunk(delta: dict[str, object], **more: object) -> bytes:
    return b"data: %b\n\n" % json.dumps({"id": "x", "choices": [{"index": 0, "delta": delta} | more]}).encode()


ROLE = chunk({"role": "assistant", "content": ""}, logprobs=None, finish_reason=None)
TOKEN = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'
ERROR = b'data: {"error": {"message": "no KV", "code": 500}}\n\n'
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


def said(stream: bytes, cuts: list[int] = []) -> Said:  # noqa: B006
    """What a stream says first that comes in parts, cut at these places."""
    beginning, found, start = Beginning(), Said.NOTHING, 0
    for end in [*sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]:
        if found is Said.NOTHING:
            found = beginning.add(stream[start:end])
            assert beginning.held == stream[:end]
        start = end
    return found


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        pytest.param(b"", Said.NOTHING, id="nothing at all"),
        pytest.param(PING * 3, Said.NOTHING, id="comments"),
        pytest.param(ROLE * 2, Said.NOTHING, id="the roles of two choices"),
        pytest.param(PING + ROLE + PING + DONE, Said.NOTHING, id="an end without a token"),
        pytest.param(b'data: {"choices": []}\n\n', Said.NOTHING, id="a chunk without a choice"),
        pytest.param(TOKEN[:-1], Said.NOTHING, id="an unfinished event"),
        pytest.param(TOKEN, Said.SOMETHING, id="a token"),
        pytest.param(ROLE + chunk({"content": "a"}), Said.SOMETHING, id="a token of a chat"),
        pytest.param(chunk({"role": "assistant", "content": "a"}), Said.SOMETHING, id="role and token together"),
        pytest.param(chunk({"role": "assistant", "reasoning": "a"}), Said.SOMETHING, id="reasoning"),
        pytest.param(chunk({"role": "assistant", "tool_calls": [{}]}), Said.SOMETHING, id="a tool's call"),
        pytest.param(chunk({}, finish_reason="stop"), Said.SOMETHING, id="an end"),
        pytest.param(chunk({"role": "assistant"}, finish_reason="stop"), Said.SOMETHING, id="role and end together"),
        pytest.param(b"data: hello\n\n", Said.SOMETHING, id="no JSON"),
        pytest.param(b"data: %b%b\n\n" % (b"[" * 5000, b"]" * 5000), Said.SOMETHING, id="what is nested too deeply"),
        pytest.param(b'data: {"\xff": 0}\n\n', Said.SOMETHING, id="no UTF-8"),
        pytest.param(ERROR, Said.ERROR, id="an error"),
        pytest.param(PING + ROLE + ERROR + DONE, Said.ERROR, id="an error after the role"),
        pytest.param(ERROR.replace(b"data: ", b"data:"), Said.ERROR, id="without a space"),
        pytest.param(ERROR.replace(b"\n", b"\r\n"), Said.ERROR, id="with carriage returns"),
        pytest.param(ERROR.replace(b"\n", b"\r"), Said.ERROR, id="with carriage returns alone"),
        pytest.param(b"event: error\nid: 7\n" + ERROR, Said.ERROR, id="with other fields"),
        pytest.param(b'data: {"error":\ndata: {}}\n\n', Said.ERROR, id="in two lines"),
        pytest.param(
            b'data: {"error": null, "choices": [{"text": "a"}]}\n\n', Said.SOMETHING, id="an error that is null"
        ),
        pytest.param(TOKEN + ERROR, Said.SOMETHING, id="an error after a token"),
    ],
)
@given(cuts=st.lists(st.integers(0, 10_000), max_size=5))
def test_a_stream_says_the_same_however_the_network_cuts_it(stream: bytes, expected: Said, cuts: list[int]) -> None:
    assert said(stream, cuts) is expected


@pytest.mark.parametrize("event", [b"\n\n", PING, ROLE])
def test_how_many_events_are_held_has_a_bound(event: bytes) -> None:
    """Each costs the loop some microseconds."""
    beginning = Beginning()
    assert beginning.add(event * (limits.HELD_EVENTS - 1)) is Said.NOTHING
    assert beginning.add(event) is Said.SOMETHING


def errors_in(stream: bytes, cuts: list[int] = []) -> list[bool]:  # noqa: B006
    """Whether there is an error in each of the parts of the stream, cut at these places."""
    errors = Errors()
    places = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [errors.are_in(stream[start:end]) for start, end in itertools.pairwise(places)]


@pytest.mark.parametrize(
    "stream",
    [ERROR, TOKEN + ERROR + DONE, TOKEN + ERROR.replace(b"\n", b"\r\n"), b"data: %b\n\n" % (b"x" * 50_000) + ERROR],
)
@given(cuts=st.lists(st.integers(0, 100_000), max_size=5))
def test_an_error_is_seen_wherever_it_is_and_however_the_network_cuts_it(stream: bytes, cuts: list[int]) -> None:
    assert any(errors_in(stream, cuts))


@pytest.mark.parametrize(
    "stream",
    [
        TOKEN,
        chunk({"content": json.dumps({"error": "x"})}),
        b'data: {"error": null, "choices": [{"text": "a"}]}\n\n',
        b'{"error": {}}',
    ],
)
@given(cuts=st.lists(st.integers(0, 10_000), max_size=5))
def test_what_is_no_error_is_not_taken_for_one(stream: bytes, cuts: list[int]) -> None:
    assert not any(errors_in(stream, cuts))


def test_of_an_event_without_an_end_little_is_held() -> None:
    errors = Errors()
    for _ in range(100):
        assert not errors.are_in(b"x" * 1000)
        assert len(errors._begun) <= limits.ERROR_EVENT_BYTES


def test_what_is_held_has_a_bound() -> None:
    beginning = Beginning()
    part = b"x" * 1000
    while beginning.add(part) is Said.NOTHING:
        assert len(beginning.held) < limits.HELD_BYTES
    assert len(beginning.held) < limits.HELD_BYTES + len(part)
