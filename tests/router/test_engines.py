"""Requests that are prefilled on one engine and decoded on another: what either is asked, and what is left behind."""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from kvd.engines.sglang.handoff import PREFIX, read
from kvd.errors import BadRequest
from kvd.router.clients.http import HttpServer
from kvd.router.engines import HANDOFF, Engine, Prefilled, place, prefilled_of
from kvd.router.upstream import Timeouts
from tests.router.scripted import (
    BODY,
    DONE,
    PARAMS,
    Answering,
    Scripted,
    Stage,
    decoded,
    event,
    failing,
    hanging,
    refusing,
    scripted,
)
from tests.support.patience import MOMENT

LIKELY = {
    "token_ids": [9],
    "logprobs": {"token_logprobs": [-0.5], "top_logprobs": [{"token_id:3": -1.5, "token_id:9": -0.5}]},
}
FIRST = [9, -0.5, [[9, -0.5], [3, -1.5]]]
TOLD = PARAMS | {"kvd_prompt": 7}


async def vllm_prefilled(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"choices": [LIKELY], "kv_transfer_params": TOLD})


async def silent_about_its_token(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"choices": [{"text": "a"}], "kv_transfer_params": TOLD})


class SglangPrefill(Scripted):
    """An SGLang that prefills: its bootstrap server is at the same port. A room has its parameters once it is asked."""

    def __init__(self, answering: Answering) -> None:
        super().__init__(answering)
        self.rooms: dict[int, asyncio.Event] = {}
        self.wanted: list[int] = []
        self.refused = False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if not request.path.startswith("/kvd/rooms/"):
            return await super().handle(request)
        room = int(request.path.rpartition("/")[2])
        self.wanted.append(room)
        await self.tell()
        if self.refused:
            return web.json_response({"error": {"message": "no memory"}}, status=503)
        await self.rooms.setdefault(room, asyncio.Event()).wait()
        return web.json_response({"kv_transfer_params": TOLD})


async def read_later(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Offers what it has computed, and answers when that has been read: here never, so that it must be ended."""
    assert isinstance(server, SglangPrefill)
    server.rooms.setdefault(body["bootstrap_room"], asyncio.Event()).set()
    await asyncio.Event().wait()
    raise AssertionError


@contextlib.asynccontextmanager
async def between(prefill: Answering, decode: list[Answering], *, sglang: tuple[bool, bool]) -> AsyncIterator[Stage]:
    """A router between a prefill and decode servers, of which `sglang` says what they are."""
    async with contextlib.AsyncExitStack() as stack:
        p = await stack.enter_async_context(scripted(prefill, kind=SglangPrefill if sglang[0] else Scripted))
        ds = [await stack.enter_async_context(scripted(answering)) for answering in decode]
        port = p.url.rpartition(":")[2]
        first = f"sglang://127.0.0.1:{port}?bootstrap={port}" if sglang[0] else p.url
        others = [d.url.replace("http", "sglang") if sglang[1] else d.url for d in ds]
        server = await stack.enter_async_context(HttpServer("127.0.0.1", 0, [first], others, Timeouts(MOMENT, MOMENT)))
        stage = Stage(server, [p], ds)
        await stack.enter_async_context(stage.session)
        yield stage


def handed(body: dict[str, Any]) -> dict[str, Any]:
    """What a decode server of SGLang's was handed."""
    assert body["bootstrap_room"] > 0
    text = body["bootstrap_host"].removeprefix(HANDOFF)
    found: dict[str, Any] = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    return found


async def test_a_vllm_prefills_with_its_token_what_an_sglang_decodes() -> None:
    async with between(vllm_prefilled, [decoded], sglang=(False, True)) as stage:
        status, said = await stage.ask(logprobs=2)
        assert (status, said) == (200, event(0) + event(1) + event(2) + DONE)
        (asked,) = stage.prefill[0].bodies
        assert (asked["max_tokens"], asked["logprobs"], asked["stream"]) == (1, 2, False)
        assert asked["return_token_ids"]
        assert asked["return_tokens_as_token_ids"]
        assert asked["kv_transfer_params"]["do_remote_decode"]
        (body,) = stage.decode[0].bodies
        assert handed(body) == {"params": TOLD, "first": FIRST}
        assert {name: body[name] for name in BODY} == BODY
        assert "kv_transfer_params" not in body
        adapters = read(body["bootstrap_host"])
        assert HANDOFF == PREFIX
        assert adapters.first is not None
        assert (adapters.params.kvd_ticket, adapters.first.token) == ("T", 9)


async def test_an_sglang_prefills_in_a_room_what_a_vllm_decodes() -> None:
    async with between(read_later, [decoded], sglang=(True, False)) as stage:
        assert (await stage.ask())[0] == 200
        (asked,) = stage.prefill[0].bodies
        prefill = stage.prefill[0]
        assert isinstance(prefill, SglangPrefill)
        assert prefill.wanted == [asked["bootstrap_room"]]
        assert (asked["max_tokens"], asked["stream"], asked["bootstrap_host"]) == (1, False, "127.0.0.1")
        assert "kv_transfer_params" not in asked
        assert stage.decode[0].bodies == [BODY | {"kv_transfer_params": TOLD}]
        await prefill.until(lambda server: server.open == 0)


async def test_two_sglangs_leave_the_first_token_to_the_record() -> None:
    async with between(read_later, [decoded], sglang=(True, True)) as stage:
        assert (await stage.ask())[0] == 200
        (body,) = stage.decode[0].bodies
        assert handed(body) == {"params": TOLD, "first": None}
        assert body["bootstrap_room"] == stage.prefill[0].bodies[0]["bootstrap_room"]


async def test_a_decode_server_that_fails_is_replaced_by_another_with_the_same_prefill() -> None:
    async with between(read_later, [failing, decoded], sglang=(True, False)) as stage:
        for _ in range(2):
            assert (await stage.ask())[0] == 200
        asked = [body["bootstrap_room"] for body in stage.prefill[0].bodies]
        assert len(set(asked)) == len(asked)


async def test_a_prefill_whose_decode_fails_is_aborted_so_that_its_offer_is_withdrawn() -> None:
    async with between(read_later, [refusing], sglang=(True, False)) as stage:
        assert (await stage.ask())[0] == 400
        await stage.prefill[0].until(lambda server: server.open == 0 and server.aborted == 1)
        assert stage.decode[0].releases == []


async def test_a_client_that_is_gone_ends_a_prefill_in_a_room() -> None:
    async with between(hanging, [decoded], sglang=(True, False)) as stage:
        asking = asyncio.create_task(stage.ask())
        await stage.prefill[0].until(lambda server: server.open == 1)
        asking.cancel()
        await stage.prefill[0].until(lambda server: server.aborted == 1)


async def test_what_a_prefill_server_refuses_the_client_hears() -> None:
    async with between(refusing, [decoded], sglang=(True, False)) as stage:
        status, error = await stage.error()
        assert (status, error["message"]) == (400, "too long")


async def test_a_room_without_an_offer_is_a_failure_of_its_server() -> None:
    async with between(hanging, [decoded], sglang=(True, False)) as stage:
        assert isinstance(stage.prefill[0], SglangPrefill)
        stage.prefill[0].refused = True
        status, error = await stage.error()
        assert status == 502
        assert "no memory" in error["message"]
        await stage.prefill[0].until(lambda server: server.open == 0)


async def test_a_prefill_that_does_not_tell_its_token_cannot_be_decoded_by_an_sglang() -> None:
    async with between(silent_about_its_token, [decoded], sglang=(False, True)) as stage:
        assert (await stage.error())[0] == 502
        assert stage.decode[0].bodies == []


@pytest.mark.parametrize("sglang", [(True, False), (False, True)])
async def test_several_completions_of_one_prefill_are_refused_where_an_sglang_serves(sglang: tuple[bool, bool]) -> None:
    async with between(hanging, [decoded], sglang=sglang) as stage:
        status, error = await stage.error(n=2)
        assert status == 400
        assert "n is 2" in error["message"]


async def test_an_offer_that_no_sglang_took_is_released_through_one() -> None:
    async with between(vllm_prefilled, [failing, decoded], sglang=(False, True)) as stage:
        for _ in range(2):
            await stage.ask()
        bodies = [body for server in stage.decode for body in server.bodies]
        assert all(handed(body)["first"] == FIRST for body in bodies)


@pytest.mark.parametrize(
    ("choice", "first"),
    [
        (LIKELY, (9, -0.5, ((9, -0.5), (3, -1.5)))),
        ({"token_ids": [4]}, (4, 0.0, ())),
        (
            {
                "token_ids": [9],
                "logprobs": {
                    "content": [
                        {
                            "token": "token_id:9",
                            "logprob": -0.5,
                            "top_logprobs": [{"token": "token_id:9", "logprob": -0.5}],
                        }
                    ]
                },
            },
            (9, -0.5, ((9, -0.5),)),
        ),
    ],
)
def test_the_first_token_is_read_from_completions_and_from_chats(choice: dict[str, Any], first: Any) -> None:
    found = prefilled_of(json.dumps({"choices": [choice], "kv_transfer_params": {"a": 1}}).encode(), with_token=True)
    assert found == Prefilled(found.params if found else b"", first)


def test_a_token_without_a_number_is_no_token() -> None:
    choice = {"token_ids": [4], "logprobs": {"token_logprobs": [-1.0], "top_logprobs": [{"token_id:x": -1.0}]}}
    answer = json.dumps({"choices": [choice], "kv_transfer_params": {"a": 1}}).encode()
    assert prefilled_of(answer, with_token=True) is None
    assert prefilled_of(answer, with_token=False) is not None


@pytest.mark.parametrize(
    ("url", "engine", "where"),
    [
        ("http://10.0.0.1:8000", Engine.VLLM, ("http://10.0.0.1:8000", 0)),
        ("sglang://10.0.0.1:30000", Engine.SGLANG, ("http://10.0.0.1:30000", 8998)),
        ("sglang://[::1]:30000?bootstrap=9000", Engine.SGLANG, ("http://[::1]:30000", 9000)),
    ],
)
def test_a_url_says_what_runs_there(url: str, engine: Engine, where: tuple[str, int]) -> None:
    found = place(url)
    assert found.engine is engine
    assert (found.url, found.bootstrap_port) == where


@pytest.mark.parametrize(
    "url",
    [
        "ftp://a:1",
        "http://a:1/path",
        "http://a:1?bootstrap=5",
        "sglang://a:1?bootstrap=0",
        "sglang://a:1?bootstrap=x",
        "sglang://a:1?other=1",
        "sglang://:1",
        "http://a:0",
        "http://a:99999",
        "http://a..b:1",
        "http://a\\b:1",
        "http://user:password@a:1",
    ],
)
def test_what_is_no_url_of_a_server_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(BadRequest, match="sglang://host:port"):
        place(url)
