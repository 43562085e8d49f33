"""What becomes of a client's body."""

import json
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import BadRequest, ErrorCode
from kvd.router import limits
from kvd.router.body import Body
from kvd.router.engines import Engine, Prefilled, place, prefilled_of

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
    "echo",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
}


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def many_fields(number: int) -> bytes:
    return json.dumps({f"f{one}": one for one in range(number)}).encode()


@given(st.dictionaries(st.text().filter(lambda name: name not in SET), JSON, max_size=5))
def test_fields_that_the_router_does_not_know_reach_every_server(fields) -> None:
    body = Body(json.dumps(fields).encode())
    for made in (
        body.for_prefill(),
        body.for_decode(Prefilled(msgspec.Raw(b"{}"))),
        body.for_release(Prefilled(msgspec.Raw(b"{}"))),
    ):
        kept = json.loads(made)
        assert {name: kept[name] for name in fields} == fields


def test_numbers_keep_their_digits() -> None:
    body = Body(b'{"seed": 123456789012345678901234567890, "top_p": 0.10000000000000000001}')
    made = body.for_decode(Prefilled(PARAMS))
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
        (b'{"ec_transfer_params": {"a": %b}}' % nested(64), "ec_transfer_params is nested too deeply; 64 levels"),
        (b'{"response_format": %b}' % nested(65), "response_format is nested too deeply; 64 levels"),
        (b'{"\xff": 0}', "no UTF-8"),
        (b'{"n": "\xff"}', "n: "),
        (b'{"n": 0}', "n is 0"),
        (b'{"n": "x"}', "n: "),
        (b'{"n": 1025}', "n is 1025"),
        (b'{"prompt": ["a", "b"]}', "2 prompts"),
        (b'{"prompt": [[1, 2], [3]]}', "2 prompts"),
        (b'{"prompt": [ "a" , 7]}', "2 prompts"),
        (b'{"prompt_embeds": ["a", "b"]}', "2 prompts"),
        (b'{"prompt": "a", "prompt_embeds": "b"}', "2 prompts"),
        (b'{"prompt": [1, 2], "prompt_embeds": ["b"]}', "2 prompts"),
        (b'{"kv_transfer_params": {}}', "kv_transfer_params is set by the router"),
        (b'{"prompt": [%b""]}' % (b'"",' * 1_000_000), "2 prompts or more"),
        (many_fields(257), "257 fields; at most 256"),
    ],
)
def test_what_cannot_be_routed_is_refused_with_the_reason(data: bytes, named: str) -> None:
    with pytest.raises(BadRequest, match=named) as caught:
        Body(data)
    assert caught.value.code == ErrorCode.BAD_MESSAGE


def test_what_is_nested_as_deeply_as_servers_take_is_routed() -> None:
    wide = b"[%b[]]" % (b"[]," * 1000)
    for value in (nested(64), wide, b'"%b"' % (b"[" * 1000), b'{"a": %b}' % nested(63)):
        assert is_taken(b'{"response_format": %b}' % value)
    assert is_taken(b'{"messages": [{"content": %b}]}' % nested(100))


@given(st.recursive(st.text('[{]}"\\\\a'), lambda some: st.lists(some) | st.dictionaries(st.text('[{]}"\\\\'), some)))
def test_levels_are_those_of_arrays_and_objects_and_not_of_what_strings_say(value) -> None:
    def depth(value) -> int:
        inside = value.values() if isinstance(value, dict) else value
        return 0 if isinstance(value, str) else 1 + max(map(depth, inside), default=0)

    levels = 64 - depth(value)
    for more in (levels, levels + 1):
        assert is_taken(b'{"x": %b%b%b}' % (b"[" * more, json.dumps(value).encode(), b"]" * more)) == (more == levels)


@pytest.mark.parametrize("value", [b"[]", b'{"":0}', b"1e-320", b"1e400", b"1" * 5000], ids=lambda value: value[:6])
def test_nothing_is_made_of_the_values_of_fields_that_the_router_does_not_set(value: bytes) -> None:
    most = min(1_000_000 // (len(value) + 1), limits.BRACKETS - 1000)
    data = b'{"tools":[%b%b]}' % (b"[]," * 100, b",".join([value] * most))
    tracemalloc.start()
    body = Body(data)
    assert tracemalloc.get_traced_memory()[1] < 4 * len(data)
    tracemalloc.stop()
    assert body.for_decode(None) == data


def test_a_chat_whose_depth_is_found_late_is_refused_like_any_other() -> None:
    """How deep is too deep depends on the caller's stack, too."""

    def prefixes_of(body: Body, frames: int) -> tuple[bytes, ...]:
        return prefixes_of(body, frames - 1) if frames else body.prefixes

    deepest = max(depth for depth in range(500, 1000) if is_taken(b'{"messages": %b}' % nested(depth)))
    with pytest.raises(BadRequest, match="nested too deeply"):
        prefixes_of(Body(b'{"messages": %b}' % nested(deepest)), 50)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(many_fields(1_000_000), id="very many fields"),
        pytest.param(b'{"messages":' + b" " * 2_000_000 + b"[0]}", id="very much space"),
        pytest.param(b'{"tools":[%b0]}' % (b"0," * 1_000_000), id="very much of one field"),
    ],
)
def test_fields_that_are_not_expected_to_be_long_are_refused_before_objects_are_made_of_them(data: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(BadRequest, match="at most 1048576 are taken") as caught:
        Body(data)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    assert caught.value.code == ErrorCode.TOO_LARGE


def test_other_fields_have_a_bound_of_brackets_together() -> None:
    """To look for the levels of very many takes long, though they are few."""
    half = b"[%b{}]" % (b"[]," * (limits.BRACKETS // 2 - 2))
    assert Body(b'{"x": %b, "tools": %b, "messages": %b}' % (half, half, half)).choices == 1
    with pytest.raises(BadRequest, match="have 65537 opening brackets; at most 65536 are taken") as caught:
        Body(b'{"x": %b, "tools": %b, "y": []}' % (half, half))
    assert caught.value.code == ErrorCode.TOO_LARGE


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b'{"messages":[%b0]}' % (b"0," * 8_000_000), id="numbers for messages"),
        pytest.param(b'{"messages":[%b{}]}' % (b"{}," * 5_000_000), id="empty messages"),
        pytest.param(b'{"prompt":[%b0]}' % (b"0," * 8_000_000), id="token ids"),
        pytest.param(b'{"prompt":["%b"]}' % (b"x," * 8_000_000), id="text"),
        pytest.param(b'{"prompt_embeds":"%b"}' % (b"x" * 16_000_000), id="embeddings"),
    ],
)
def test_a_large_body_is_read_in_a_few_times_its_own_memory(data: bytes) -> None:
    tracemalloc.start()
    body = Body(data)
    assert len(body.prefixes) < 20
    assert tracemalloc.get_traced_memory()[1] < 2.1 * len(data)
    tracemalloc.stop()
    assert len(body.for_decode(Prefilled(PARAMS))) > len(data)


def is_taken(data: bytes) -> bool:
    try:
        Body(data)
    except BadRequest:
        return False
    return True


@pytest.mark.parametrize(
    "data",
    [
        b'{"prompt": [1, 2, 3]}',
        b'{"prompt": ["a"]}',
        b'{"prompt": [[1, 2]]}',
        b'{"n": null}',
        b'{"prompt_embeds": "a"}',
        b'{"prompt_embeds": ["a"], "prompt": null}',
        b'{"prompt_embeds": ["a"], "prompt": [ ]}',
        b'{"prompt_embeds": [], "prompt": "a"}',
    ],
)
def test_one_prompt_is_taken_in_every_form(data: bytes) -> None:
    assert Body(data).choices == 1


@pytest.mark.parametrize("value", [True, 1, 1.0, "true", "True", "1", "yes", "on", False, 0, "false", "no", None])
def test_an_answer_is_streamed_whenever_vllm_streams_it(value) -> None:
    streamed = value not in {False, "false", "no", None}
    assert Body(json.dumps({"prompt": "a", "stream": value}).encode()).streamed == streamed


def test_what_nobody_reads_of_a_prefill_is_not_asked_for() -> None:
    asked = {"echo": True, "logprobs": 5, "top_logprobs": 2, "prompt_logprobs": 20, "logprob_token_ids": [1]}
    body = Body(json.dumps({"prompt": "a"} | asked).encode())
    assert not asked.keys() & json.loads(body.for_prefill()).keys()
    assert not asked.keys() & json.loads(body.for_release(Prefilled(PARAMS))).keys()
    assert json.loads(body.for_decode(Prefilled(msgspec.Raw(b"{}"))))["prompt_logprobs"] == 20


def test_a_client_does_not_choose_the_id_by_which_sglang_ends_requests():
    body = Body(b'{"prompt": "a", "rid": "a"}')
    assert body.for_decode(None, Engine.SGLANG) == b'{"prompt":"a"}'
    assert b"rid" not in body.for_prefill()


def test_parameters_that_are_null_are_none() -> None:
    body = Body(b'{"prompt": "a", "kv_transfer_params": null}')
    assert json.loads(body.for_decode(None)) == {"prompt": "a"}


def test_a_client_names_neither_the_server_that_has_prefilled_nor_the_room_where_two_meet() -> None:
    body = Body(b'{"prompt": "a", "bootstrap_host": "other", "bootstrap_port": 1, "bootstrap_room": 2}')
    asked = body.for_room(place("sglang://p:7?bootstrap=8"), 5), body.for_decode(Prefilled(PARAMS), Engine.SGLANG, 5)
    for fields in map(json.loads, asked):
        assert (fields["bootstrap_host"] == "other", fields["bootstrap_port"] == 1, fields["bootstrap_room"]) == (
            False,
            False,
            5,
        )


def test_a_byte_order_mark_is_no_part_of_the_body() -> None:
    assert json.loads(Body(b'\xef\xbb\xbf{"prompt": "a"}').for_decode(None)) == {"prompt": "a"}


def test_parameters_of_an_answer_keep_their_bytes() -> None:
    found = prefilled_of(b'{"choices": [], "kv_transfer_params": {"a" : 1.00}}', with_token=False)
    assert found is not None
    assert bytes(found.params) == b'{"a" : 1.00}'


@pytest.mark.parametrize(
    "answer",
    [b"", b"[]", b"{}", b'{"kv_transfer_params": null}', b'{"kv_transfer_params": 3}', nested(100_000)],
    ids=lambda answer: answer[:30].decode(),
)
def test_an_answer_without_parameters_has_none(answer: bytes) -> None:
    assert prefilled_of(answer, with_token=False) is None
    assert prefilled_of(answer, with_token=True) is None
