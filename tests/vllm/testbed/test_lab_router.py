"""The router and the client of the laboratory against servers that only pretend to be vLLM."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.vllm.testbed.client import complete, make_body
from tests.vllm.testbed.http import HttpError, read_head
from tests.vllm.testbed.router import Router

PARAMS = {"do_remote_prefill": True, "anything": ["passed", "on"]}
BODY = make_body("tiny", [5, 6, 7], 2)

Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    """A server whose answers are written by `answer`, as its URL."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, headers = await read_head(reader)
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        await answer(body, writer)
        writer.close()

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        yield url_of(server)


@contextlib.asynccontextmanager
async def routed(prefill: Answer, decode: Answer) -> AsyncIterator[str]:
    async with serving(prefill) as first, serving(decode) as second:
        router = Router(first, second)
        async with await asyncio.start_server(router.connected, "127.0.0.1", 0) as server:
            yield url_of(server)


def url_of(server: asyncio.Server) -> str:
    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def prefilled(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    assert (body["max_tokens"], body["stream"]) == (1, False)
    assert body["kv_transfer_params"]["do_remote_decode"] is True
    reply(writer, 200, {"kv_transfer_params": PARAMS})


def reply(writer: asyncio.StreamWriter, status: int, body: object) -> None:
    data = json.dumps(body).encode()
    writer.write(b"HTTP/1.1 %d -\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data))


def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def event(token: int, finish: str | None = None) -> bytes:
    logprobs = {"token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -2.0}]}
    choice = {"token_ids": [token], "logprobs": logprobs, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


async def decoded(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    assert body["kv_transfer_params"] == PARAMS
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    first = event(8)
    for data in (first[:20], first[20:] + event(9, "length"), b"data: [DONE]\n\n", b""):
        chunk(writer, data)


async def broken_off(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunk(writer, event(8))


async def refused(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    reply(writer, 500, {"error": "no KV"})


async def failed_later(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for data in (event(8), b'data: {"error": {"message": "no KV", "code": 500}}\n\n', b"data: [DONE]\n\n", b""):
        chunk(writer, data)


async def test_a_completion_passes_from_the_prefill_side_through_the_decode_side_to_the_client() -> None:
    async with routed(prefilled, decoded) as url:
        completion = await complete(url, BODY)
    assert completion.tokens == [8, 9]
    assert completion.logprobs == [-0.5, -0.5]
    assert completion.margins == [1.5, 1.5]
    assert completion.finish == "length"
    assert len(completion.times) == 2


@pytest.mark.parametrize(
    ("prefill", "decode", "status"),
    [
        pytest.param(refused, decoded, 500, id="the prefill side refuses"),
        pytest.param(prefilled, refused, 500, id="the decode side refuses"),
        pytest.param(broken_off, decoded, 502, id="the prefill side breaks off"),
        pytest.param(prefilled, broken_off, 0, id="the decode side breaks off"),
        pytest.param(prefilled, failed_later, 500, id="the decode side fails after its first token"),
    ],
)
async def test_a_failure_of_either_side_is_an_error_at_the_client(prefill: Answer, decode: Answer, status: int) -> None:
    async with routed(prefill, decode) as url:
        with pytest.raises(HttpError) as caught:
            await complete(url, BODY)
    assert caught.value.status == status


async def test_a_server_that_is_not_there_is_an_error_of_the_router_and_of_the_client() -> None:
    async with serving(prefilled) as gone:
        pass
    with pytest.raises(HttpError):
        await complete(gone, BODY)
    async with await asyncio.start_server(Router(gone, gone).connected, "127.0.0.1", 0) as server:
        with pytest.raises(HttpError) as caught:
            await complete(url_of(server), BODY)
    assert caught.value.status == 502
