"""What becomes of a client's body."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import BadRequest, ErrorCode
from kvd.router.body import Body, params_of

PARAMS = msgspec.Raw(b'{"kvd_ticket": "T",  "x": 1e400}')
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda some: st.lists(some, max_size=3))
SET = {
    "n",
    "prompt",
    "messages",
    "max_tokens",
    "stream",
    "kv_transfer_params",
    "min_tokens",
    "stream_options",
    "max_completion_tokens",
}


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@given(st.dictionaries(st.text().filter(lambda name: name not in SET), JSON, max_size=5))
def test_fields_that_the_router_does_not_know_reach_every_server(fields) -> None:
    body = Body(json.dumps(fields).encode())
    for made in (body.for_prefill(), body.for_decode(msgspec.Raw(b"{}")), body.for_release(msgspec.Raw(b"{}"))):
        kept = json.loads(made)
        assert {name: kept[name] for name in fields} == fields


def test_numbers_keep_their_digits() -> None:
    body = Body(b'{"seed": 123456789012345678901234567890, "top_p": 0.10000000000000000001}')
    made = body.for_decode(PARAMS)
    assert b"123456789012345678901234567890" in made
    assert b"0.10000000000000000001" in made
    assert bytes(PARAMS) in made


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "no JSON object"),
        (b"[1]", "no JSON object"),
        (b'{"x": %b}' % nested(100_000), "nested too deeply"),
        (b'{"n": %b}' % nested(100_000), "nested too deeply"),
        (b'{"n": 0}', "n is 0"),
        (b'{"n": "x"}', "n: "),
        (b'{"n": 1025}', "n is 1025"),
        (b'{"prompt": ["a", "b"]}', "2 prompts"),
        (b'{"prompt": [[1, 2], [3]]}', "2 prompts"),
        (b'{"prompt": [ "a" , 7]}', "2 prompts"),
        (b'{"kv_transfer_params": {}}', "kv_transfer_params is set by the router"),
    ],
)
def test_what_cannot_be_routed_is_refused_with_the_reason(data: bytes, named: str) -> None:
    with pytest.raises(BadRequest, match=named) as caught:
        Body(data)
    assert caught.value.code == ErrorCode.BAD_MESSAGE


def test_a_chat_whose_depth_is_found_late_is_refused_like_any_other() -> None:
    """How deep is too deep depends on the caller's stack, too."""

    def prefixes_of(body: Body, frames: int) -> tuple[bytes, ...]:
        return prefixes_of(body, frames - 1) if frames else body.prefixes

    deepest = max(depth for depth in range(500, 1000) if is_taken(b'{"messages": %b}' % nested(depth)))
    with pytest.raises(BadRequest, match="nested too deeply"):
        prefixes_of(Body(b'{"messages": %b}' % nested(deepest)), 50)


def is_taken(data: bytes) -> bool:
    try:
        Body(data)
    except BadRequest:
        return False
    return True


@pytest.mark.parametrize(
    "data", [b'{"prompt": [1, 2, 3]}', b'{"prompt": ["a"]}', b'{"prompt": [[1, 2]]}', b'{"n": null}']
)
def test_one_prompt_is_taken_in_every_form(data: bytes) -> None:
    assert Body(data).choices == 1


def test_parameters_of_an_answer_keep_their_bytes() -> None:
    found = params_of(b'{"choices": [], "kv_transfer_params": {"a" : 1.00}}')
    assert found is not None
    assert bytes(found) == b'{"a" : 1.00}'


@pytest.mark.parametrize(
    "answer",
    [b"", b"[]", b"{}", b'{"kv_transfer_params": null}', b'{"kv_transfer_params": 3}', nested(100_000)],
    ids=lambda answer: answer[:30].decode(),
)
def test_an_answer_without_parameters_has_none(answer: bytes) -> None:
    assert params_of(answer) is None
