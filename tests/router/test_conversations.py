"""Turns of conversations: what a decode server kept of the last one reaches the next one's prefill, and nobody else."""

import asyncio
import gc
from typing import Any

import msgspec
import pytest
from aiohttp import web

from kvd.engines.redaction import _TICKET
from kvd.router import limits
from kvd.router.body import Body, Request, seconds_of
from kvd.router.conversations import _own_key
from tests.router.scripted import (
    BODY,
    DONE,
    PARAMS,
    Answering,
    Scripted,
    Stage,
    answering,
    decoded,
    event,
    failing,
    hanging,
    prefilled,
    routed,
    stalled,
    streaming,
    until,
    vanishing,
)
from tests.support.patience import MOMENT

CHAT = "/v1/chat/completions"
LEFT = {"do_remote_prefill": False, "do_remote_decode": True, "kvd_ticket": "L", "kvd_ttl": 100.0, "n": 1}


def keeping(asked: Answering | None = None, elsewhere: Answering = decoded, **more: Any) -> Answering:
    """A decode server that keeps turns; `asked` answers who asks for one, `elsewhere` all other requests."""

    async def answer(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        params = body.get("kv_transfer_params")
        if params is None or set(params) != {"kvd_turn"}:
            return await elsewhere(server, request, body)
        if asked is not None:
            return await asked(server, request, body)
        kept = [b["kv_transfer_params"]["kvd_turn"] for b in server.bodies if "stream" in b]
        assert params["kvd_turn"] in kept
        return web.json_response({"choices": [], "kv_transfer_params": LEFT | more | {"turn": params["kvd_turn"]}})

    return answer


def chat(*texts: str) -> list[dict[str, str]]:
    """Messages of a user and of an assistant in turns."""
    return [{"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(texts)]


def given(server: Scripted) -> list[Any]:
    """The turn that each prefill got."""
    return [body["kv_transfer_params"].get("turn") for body in server.bodies]


def named(server: Scripted) -> list[str]:
    """What the turn of each request to a decode server was called."""
    return [body["kv_transfer_params"]["kvd_turn"] for body in server.bodies if "stream" in body]


async def turns(stage: Stage, outcome: str) -> float:
    return await stage.metric(f'kvd_router_turns_total{{outcome="{outcome}"}}')


async def kept(stage: Stage, number: int = 1, outcome: str = "kept") -> None:
    async with asyncio.timeout(MOMENT):
        while await turns(stage, outcome) < number:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_next_turn_of_a_chat_is_prefilled_with_what_the_last_one_left(stream: bool) -> None:
    async with routed([prefilled], [keeping()]) as stage:
        for number, texts in enumerate([("a",), ("a", "b", "c"), ("a", "b", "c", "d", "e")]):
            assert (await stage.ask(CHAT, messages=chat(*texts), stream=stream))[0] == 200
            await kept(stage, number + 1)
        (prefill,), (decode,) = stage.prefill, stage.decode
        names = named(decode)
        assert len(set(names)) == 3
        assert given(prefill) == [None, *names[:2]]
        sent = prefill.bodies[1]["kv_transfer_params"]
        assert (sent["do_remote_decode"], sent["do_remote_prefill"], sent["kvd_ticket"]) == (True, False, "L")
        assert decode.bodies[0]["kv_transfer_params"] == PARAMS | {"kvd_turn": names[0]}
        assert await turns(stage, "found") == 2
        assert await stage.metric("kvd_router_kept_turns") == 1


@pytest.mark.parametrize("cut", [0, 1, len(DONE) - 1])
async def test_a_turn_is_kept_though_its_client_closes_at_the_last_event(cut: int) -> None:
    """As clients do: what ends the stream for HTTP comes behind that. The network may cut the event."""
    beginning_is_here = asyncio.Event()

    async def endless(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if "stream" not in body:
            return await keeping()(server, request, body)
        stream = await streaming(request)
        await stream.write(event(0) + DONE[:cut])
        await beginning_is_here.wait()
        await stream.write(DONE[cut:])
        await asyncio.Event().wait()
        raise AssertionError

    async with routed([prefilled], [endless]) as stage:
        asked = BODY | {"messages": chat("a")}
        async with stage.session.post(stage.url + CHAT, json=asked) as response:
            await response.content.readexactly(len(event(0) + DONE[:cut]))
            beginning_is_here.set()
            await response.content.readuntil(DONE[cut:])
            response.close()
        await kept(stage)


async def test_nothing_is_kept_of_an_answer_that_its_client_has_not_waited_for() -> None:
    async with routed([prefilled], [stalled]) as stage:
        async with stage.session.post(stage.url + CHAT, json=BODY | {"messages": chat("a")}) as response:
            await response.content.readany()
            response.close()
        (decode,) = stage.decode
        await decode.until(lambda server: server.open == 0)
        assert len(decode.bodies) == 1


async def test_a_decode_server_is_asked_for_one_token_and_the_client_sees_no_ticket() -> None:
    async with routed([prefilled], [keeping()]) as stage:
        headers = {"Authorization": "Bearer x", "X-Request-Id": "q"}
        _, said = await stage.ask(CHAT, headers, messages=chat("a"))
        assert b"ticket" not in said
        await kept(stage)
        (decode,) = stage.decode
        asked = decode.bodies[1]
        assert asked == {
            "model": "m",
            "prompt": [0],
            "max_tokens": 1,
            "kv_transfer_params": {"kvd_turn": named(decode)[0]},
        }
        assert _TICKET.fullmatch(named(decode)[0]), "engines do not log it"
        assert decode.paths == [CHAT, "/v1/completions"]
        assert (decode.headers[1]["Authorization"], decode.headers[1]["X-Request-Id"]) == ("Bearer x", "q-turn")


async def test_other_chats_and_other_clients_get_nothing_of_it() -> None:
    async with routed([prefilled], [keeping()]) as stage:
        await stage.ask(CHAT, {"Authorization": "Bearer x"}, messages=chat("a"))
        await kept(stage)
        await stage.ask(CHAT, {"Authorization": "Bearer y"}, messages=chat("a", "b", "c"))
        await stage.ask(CHAT, {"Authorization": "Bearer x"}, messages=chat("z", "b", "c"))
        await stage.ask(CHAT, {"Authorization": "Bearer x"}, messages=chat("a", "b", "c"), model="other")
        await stage.ask(CHAT, {"Authorization": "Bearer x"}, messages=chat("a", "b", "c"), cache_salt="s")
        assert given(stage.prefill[0]) == [None] * 5
        await stage.ask(CHAT, {"Authorization": "Bearer x"}, messages=chat("a", "b", "c"))
        await stage.ask(CHAT, {"Authorization": "Bearer x"}, messages=chat("a", "b", "d"))
        assert [turn is None for turn in given(stage.prefill[0])[5:]] == [False, True]


async def test_a_conversation_is_found_by_the_name_that_its_client_gives_it() -> None:
    async with routed([prefilled], [keeping()]) as stage:
        headers = {"X-Conversation-Id": "one"}
        await stage.ask(headers=headers)
        await kept(stage)
        await stage.ask(headers={"X-Conversation-Id": "two"}, prompt="a b c d")
        await stage.ask(headers=headers, prompt="a b c d")
        assert [turn is None for turn in given(stage.prefill[0])] == [True, True, False]
        await stage.ask(conversation_id="three")
        await kept(stage, 4)
        await stage.ask(conversation_id="three", prompt="a b c d")
        assert given(stage.prefill[0])[-1] is not None


@pytest.mark.parametrize("unset", [None, ""])
async def test_a_conversation_whose_name_is_left_unset_is_found_by_its_messages(unset: Any) -> None:
    async with routed([prefilled], [keeping()]) as stage:
        for number, texts in enumerate([("a",), ("z",), ("a", "b", "c")]):
            await stage.ask(CHAT, messages=chat(*texts), conversation_id=unset)
            await kept(stage, number + 1)
        assert given(stage.prefill[0]) == [None, None, named(stage.decode[0])[0]]


@pytest.mark.parametrize(
    "more", [{"n": 2}, {"use_beam_search": True}, {"path": "/v1/completions"}, {"single": True}, {"prefill": {}}]
)
async def test_what_has_no_next_turn_is_not_kept(more: dict[str, Any]) -> None:
    async def other(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"choices": [], "kv_transfer_params": {"of": "another connector"}})

    more = dict(more)
    single, path = more.pop("single", False), more.pop("path", CHAT)
    prefill = [prefilled if more.pop("prefill", None) is None else other]
    async with routed(prefill, [keeping()], turns=not single) as stage:
        await stage.ask(path, messages=chat("a"), **more)
        await stage.ask(path, messages=chat("a", "b", "c"), **more)
        (decode,) = stage.decode
        assert not any("kvd_turn" in body.get("kv_transfer_params", {}) for body in decode.bodies)
        assert len(decode.bodies) == 2


async def telling_too_much(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"choices": [], "kv_transfer_params": LEFT | {"x": "y" * limits.TURN_BYTES}})


async def telling_no_utf_8(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    body = b'{"kv_transfer_params": {"kvd_ticket": "L", "\xff": "\xff"}}'
    return web.Response(body=body, content_type="application/json")


@pytest.mark.parametrize(
    "asked", [failing, vanishing, answering(404), answering(200), telling_too_much, telling_no_utf_8]
)
async def test_a_decode_server_that_kept_nothing_costs_no_turn(asked: Answering) -> None:
    async with routed([prefilled], [keeping(asked)]) as stage:
        await stage.ask(CHAT, messages=chat("a"))
        await kept(stage, outcome="not_kept")
        assert (await stage.ask(CHAT, messages=chat("a", "b", "c")))[0] == 200
        assert given(stage.prefill[0]) == [None, None]


async def test_a_turn_that_comes_at_once_waits_a_moment_for_what_is_being_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with routed([prefilled], [keeping(hanging)]) as stage:
        await stage.ask(CHAT, messages=chat("a"))
        assert (await stage.ask(CHAT, messages=chat("a", "b", "c")))[0] == 200
        assert await turns(stage, "missed") == 1
        assert given(stage.prefill[0]) == [None, None]
        stage.decode[0].answering = keeping()
        monkeypatch.setattr(limits, "TURN_WAIT_SECONDS", 30.0)
        await stage.ask(CHAT, messages=chat("q"))
        await stage.ask(CHAT, messages=chat("q", "b", "c"))
        assert given(stage.prefill[0])[-1] is not None


async def test_a_turn_is_forgotten_when_the_decode_server_keeps_it_no_longer() -> None:
    async with routed([prefilled], [keeping(kvd_ttl=0.0)]) as stage:
        await stage.ask(CHAT, messages=chat("a"))
        await kept(stage)
        await stage.ask(CHAT, messages=chat("a", "b", "c"))
        assert given(stage.prefill[0]) == [None, None]
        assert await turns(stage, "expired") == 1


async def test_the_latest_turns_are_remembered_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TURNS", 2)
    async with routed([prefilled], [keeping()]) as stage:
        for number, text in enumerate("abc"):
            await stage.ask(CHAT, messages=chat(text))
            await kept(stage, number + 1)
        for text in "cba":
            await stage.ask(CHAT, messages=chat(text, "x", "y"))
        assert [turn is None for turn in given(stage.prefill[0])[3:]] == [False, False, True]


async def test_decode_servers_are_asked_for_so_many_turns_at_a_time_and_keep_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "TURNS_ASKED", 1)
    async with routed([prefilled], [keeping(hanging)]) as stage:
        await stage.ask(CHAT, messages=chat("a"))
        (decode,) = stage.decode
        await decode.until(lambda server: len(server.bodies) == 2)  # the answer, and who asks for its turn
        await stage.ask(CHAT, messages=chat("b"))
        assert ["kvd_turn" in body["kv_transfer_params"] for body in decode.bodies] == [True, True, False]


async def test_no_more_turns_are_asked_for_at_a_time_though_many_answers_end_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "TURNS_ASKED", 2)
    may_end = asyncio.Event()

    async def together(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await may_end.wait()
        return await decoded(server, request, body)

    async with routed([prefilled], [keeping(hanging, together)]) as stage:
        asking = [asyncio.create_task(stage.ask(CHAT, messages=chat(text))) for text in "abcde"]
        (decode,) = stage.decode
        await decode.until(lambda server: len(server.bodies) == 5)
        may_end.set()
        await asyncio.gather(*asking)
        await kept(stage, 3, outcome="not_kept")
        await decode.until(lambda server: server.open == 2)
        assert await stage.metric("kvd_router_kept_turns") == 2


async def test_nothing_of_a_request_stays_in_memory_while_a_decode_server_is_asked_for_its_turn() -> None:
    """Its body may be large, and requests that have ended are not counted."""
    async with routed([prefilled], [keeping(hanging)]) as stage:
        await stage.ask(CHAT, messages=chat("a"))
        await stage.decode[0].until(lambda server: len(server.bodies) == 2)
        async with asyncio.timeout(MOMENT):
            while any(type(each) is Body for each in gc.get_objects()):  # noqa: ASYNC110  # isinstance wakes lazy objects
                await asyncio.sleep(0.005)
        assert stage.decode[0].open == 1


async def test_a_client_that_leaves_in_the_middle_of_an_answer_has_no_next_turn() -> None:
    async def slow(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        stream = await streaming(request)
        await stream.write(b'data: {"choices": [{"text": "t"}]}\n\n')
        await asyncio.Event().wait()
        raise AssertionError

    async with routed([prefilled], [slow]) as stage:
        asking = asyncio.create_task(stage.ask(CHAT, messages=chat("a")))
        await stage.decode[0].until(lambda server: server.open == 1)
        asking.cancel()
        await stage.decode[0].until(lambda server: server.aborted == 1)
        assert await stage.metric("kvd_router_kept_turns") == 0


async def test_another_prefill_server_gets_the_turn_if_the_first_one_fails() -> None:
    async with routed([prefilled, prefilled], [keeping()]) as stage:
        await stage.ask(CHAT, messages=chat("a"))
        await kept(stage)
        first = next(server for server in stage.prefill if server.bodies)
        first.answering = failing
        await stage.ask(CHAT, messages=chat("a", "b", "c"))
        assert [given(server)[-1] for server in stage.prefill] == named(stage.decode[0])[:1] * 2


async def test_a_router_that_stops_asks_no_longer() -> None:
    async with routed([prefilled], [keeping(hanging)]) as stage:
        await stage.ask(CHAT, messages=chat("a"))
        await stage.decode[0].until(lambda server: server.open == 1)
        decode = stage.decode[0]
    await until(lambda: decode.open == 0)


def test_flags_of_what_a_turn_left_do_not_change_what_a_prefill_is() -> None:
    left = Body(b'{"prompt": "a"}').for_prefill(
        turn=msgspec.Raw(b'{"do_remote_prefill": true, "do_remote_decode": 1, "x": [1]}')
    )
    assert b'"do_remote_decode":true' in left
    assert b'"do_remote_prefill":false' in left
    assert b'"x":[1]' in left


@pytest.mark.parametrize("params", [b'{"kvd_ttl": "x"}', b"[]", b'{"kvd_ttl": null}'])
def test_parameters_that_cannot_be_read_are_kept_for_no_time(params: bytes) -> None:
    assert seconds_of(msgspec.Raw(params)) == 0.0


@pytest.mark.parametrize("header", ["Authorization", "X-Conversation-Id"])
def test_headers_that_differ_in_bytes_that_are_no_text_are_of_other_clients(header: str) -> None:
    def key(value: bytes) -> bytes | None:
        headers = {header: value.decode(errors="surrogateescape")}  # as aiohttp reads them
        return _own_key(Request(CHAT, Body(b'{"messages": [{"content": "a"}]}'), headers, 0.0, ""))

    assert None is not key(b"x\xfe") != key(b"x\xff")
