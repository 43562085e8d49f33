"""The client of the laboratory, through the router, against servers that only pretend to be vLLM."""

import json
from typing import Any

import pytest
from aiohttp import web

from tests.router.scripted import (
    DONE,
    Answering,
    Scripted,
    failing,
    prefilled,
    routed,
    streaming,
    vanishing,
)
from tests.vllm.testbed.client import complete, make_body
from tests.vllm.testbed.http import HttpError

BODY = make_body("tiny", [5, 6, 7], 2)


def event(token: int, finish: str | None = None) -> bytes:
    logprobs = {"token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -2.0}]}
    choice = {"token_ids": [token], "logprobs": logprobs, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


async def stream(request: web.Request, *parts: bytes) -> web.StreamResponse:
    answer = await streaming(request)
    for part in parts:
        await answer.write(part)
    return answer


async def decoded(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    first = event(8)
    return await stream(request, first[:20], first[20:] + event(9, "length"), DONE)


async def broken_off(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    answer = await stream(request, event(8))
    assert request.transport is not None
    request.transport.close()
    return answer


async def too_short(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await stream(request, event(8, "stop"), DONE)


async def failed_later(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await stream(request, event(8), b'data: {"error": {"message": "no KV", "code": 500}}\n\n', DONE)


async def test_a_completion_passes_from_the_prefill_side_through_the_decode_side_to_the_client() -> None:
    async with routed([prefilled], [decoded]) as stage:
        completion = await complete(stage.url, BODY)
    assert completion.tokens == [8, 9]
    assert completion.logprobs == [-0.5, -0.5]
    assert completion.margins == [1.5, 1.5]
    assert completion.finish == "length"
    assert len(completion.times) == 2


@pytest.mark.parametrize(
    ("prefill", "decode", "status"),
    [
        pytest.param(failing, decoded, 502, id="the prefill side fails"),
        pytest.param(prefilled, failing, 502, id="the decode side fails"),
        pytest.param(vanishing, decoded, 502, id="the prefill side breaks off"),
        pytest.param(prefilled, broken_off, 0, id="the decode side breaks off"),
        pytest.param(prefilled, too_short, 0, id="the decode side makes too few tokens"),
        pytest.param(prefilled, failed_later, 500, id="the decode side fails after its first token"),
    ],
)
async def test_a_failure_of_either_side_is_an_error_at_the_client(
    prefill: Answering, decode: Answering, status: int
) -> None:
    async with routed([prefill], [decode]) as stage:
        with pytest.raises(HttpError) as caught:
            await complete(stage.url, BODY)
    assert caught.value.status == status


async def test_a_server_that_is_not_there_is_an_error() -> None:
    async with routed([prefilled], [decoded]) as stage:
        gone = stage.url
    with pytest.raises(HttpError):
        await complete(gone, BODY)
