"""Requests that both servers get at once: one after the other in the end, whatever comes in between."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvd.router import limits
from kvd.router.answer import Whole
from kvd.router.engines import place
from kvd.router.growing import Early
from tests.router.scripted import (
    BODY,
    DONE,
    PARAMS,
    Scripted,
    Stage,
    answering,
    decoded,
    event,
    failing,
    failing_in_stream,
    hanging,
    routed,
    stalled,
    streaming,
    until,
    vanishing,
)
from tests.router.test_conversations import CHAT, chat, keeping, kept
from tests.support.patience import MOMENT

PRODUCER = [{"daemon": "d", "address": "tcp://h:1", "pool": "p"}]
TICKET = PARAMS | {"kvd_producer": PRODUCER}

Gate = Callable[[], Awaitable[Any]]


def asked_early(body: dict[str, Any]) -> bool:
    return "kvd_offer" in body["kv_transfer_params"]


class Growing:
    """A prefill server whose offers grow; with `gate` set, the answer to such a request comes only after that."""

    def __init__(self) -> None:
        self.gate: asyncio.Event | None = None
        self.producer: Any = PRODUCER
        self.answer: Any = None
        """In place of the one that was asked for."""

    async def __call__(self, server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        params = body["kv_transfer_params"]
        if "kvd_offer" not in params:
            return web.json_response({"choices": [], "kv_transfer_params": PARAMS | {"kvd_producer": self.producer}})
        if self.gate is not None:
            await self.gate.wait()
        if self.answer is not None:
            return await self.answer(server, request, body)
        said = {"do_remote_prefill": True, "kvd_offer": params["kvd_offer"], "kvd_producer": self.producer}
        return web.json_response({"choices": [], "kv_transfer_params": said})


class Decoding:
    """A decode server; with `early` set, that answers requests that came before their prefill was answered."""

    def __init__(self) -> None:
        self.early: Any = None

    async def __call__(self, server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.early is not None and asked_early(body):
            return await self.early(server, request, body)
        return await decoded(server, request, body)


@pytest.fixture
def prefilling() -> Growing:
    return Growing()


@pytest.fixture
def decoding() -> Decoding:
    return Decoding()


@pytest.fixture
def computed(prefilling: Growing, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has a decode server compute the prompt itself, as the offer was lost, and end after the prefill's answer."""
    beside, begun = Early.beside, []

    async def noted(early: Early, decoding: Any, has_begun: Any) -> bool:
        begun.append((early, has_begun))
        return await beside(early, decoding, has_begun)

    async def answer(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        stream = await streaming(request)
        await stream.write(event(0))
        early, has_begun = begun[-1]
        await until(has_begun)
        assert prefilling.gate is not None
        prefilling.gate.set()
        await asyncio.wait((early.answer,))
        await stream.write(DONE)
        return stream

    monkeypatch.setattr(Early, "beside", noted)
    return answer


async def known(stage: Stage, prefilling: Growing) -> None:
    """After a first request the router knows where the prefill server's daemons are."""
    assert (await stage.ask(prompt="first"))[0] == 200
    for server in stage.prefill + stage.decode:
        server.bodies.clear()
    prefilling.gate = asyncio.Event()


async def leave_once(
    stage: Stage, decoding: Callable[[Scripted], bool], routing: Callable[[Any], bool] = lambda _router: True
) -> None:
    """A client asks, and hangs up once the decode server and the router are so far."""
    asking = asyncio.create_task(stage.ask())
    await stage.decode[0].until(decoding)
    await until(lambda: routing(stage.server._router))
    asking.cancel()


async def counted(stage: Stage, outcome: str) -> float:
    return await stage.metric(f'kvd_router_early_total{{outcome="{outcome}"}}')


def whole() -> bytes:
    return b"".join(event(number) for number in range(3)) + DONE


async def test_after_a_first_answer_both_servers_get_the_next_request_at_once(
    prefilling: Growing, decoding: Decoding
) -> None:
    async def later(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await stage.prefill[0].until(lambda one: len(one.bodies) == len(server.bodies))
        return await decoded(server, request, body)

    decoding.early = later
    async with routed([prefilling], [decoding]) as stage:
        await known(stage, prefilling)
        assert await stage.ask(n=2) == (200, whole())
        (first,), (second,) = stage.prefill[0].bodies, stage.decode[0].bodies
        asked, told = first["kv_transfer_params"], second.pop("kv_transfer_params")
        assert asked["do_remote_decode"] is True
        assert asked["kvd_consumers"] == 2
        assert told == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "kvd_offer": asked["kvd_offer"],
            "kvd_producer": PRODUCER,
            "kvd_consumers": 2,
        }
        assert second == BODY | {"n": 2}
        await stage.prefill[0].until(lambda server: server.open == 0)
        await stage.ask()
        assert stage.prefill[0].bodies[1]["kv_transfer_params"]["kvd_offer"] != asked["kvd_offer"]
        await stage.server._router.close()
        assert stage.decode[0].releases == []
        assert await counted(stage, "done") == 2


async def test_a_conversations_next_turn_goes_to_both_servers_at_once_with_what_the_last_one_left(
    prefilling: Growing,
) -> None:
    async with routed([prefilling], [keeping()]) as stage:
        assert (await stage.ask(CHAT, messages=chat("a")))[0] == 200
        await kept(stage)
        prefilling.gate = asyncio.Event()
        assert (await stage.ask(CHAT, messages=chat("a", "b", "c")))[0] == 200  # while the prefill goes on
        asked = stage.prefill[0].bodies[1]["kv_transfer_params"]
        (_, told) = [body["kv_transfer_params"] for body in stage.decode[0].bodies if "stream" in body]
        assert (asked["kvd_ticket"], asked["do_remote_decode"]) == ("L", True)
        assert told["kvd_offer"] == asked["kvd_offer"]
        assert "kvd_ticket" not in told
        await kept(stage, 2)
        assert await counted(stage, "done") == 1


async def test_a_turn_whose_prefill_is_lost_while_both_have_it_is_prefilled_elsewhere(
    prefilling: Growing, decoding: Decoding
) -> None:
    decoding.early = stalled_before_its_first_token
    async with routed([prefilling, prefilling], [keeping(elsewhere=decoding)]) as stage:
        for text in "ab":
            await stage.ask(CHAT, messages=chat(text))
        await kept(stage, 2)
        prefilling.answer = vanishing
        assert await stage.ask(CHAT, messages=chat("a", "b", "c")) == (200, whole())
        given = {server.url: server.bodies[-1]["kv_transfer_params"] for server in stage.prefill}
        assert all("turn" in params for params in given.values())  # who comes second computes what is gone
        assert sorted("kvd_offer" in params for params in given.values()) == [False, True]


async def test_a_decode_server_is_not_asked_for_prefills_that_would_only_queue(
    prefilling: Growing, decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "EARLY_REQUESTS", 2)
    async with routed([prefilling], [decoding]) as stage:
        await known(stage, prefilling)
        decoding.early = stalled_before_its_first_token
        asking = [asyncio.create_task(stage.ask(prompt=str(number))) for number in range(2)]
        await stage.prefill[0].until(lambda server: server.open == 2)
        assert (await stage.ask(prompt="third"))[0] == 200
        assert [asked_early(body) for body in stage.prefill[0].bodies] == [True, True, False]
        for task in asking:
            task.cancel()


async def test_a_prefill_server_that_does_not_say_where_its_daemons_are_is_asked_first(prefilling: Growing) -> None:
    prefilling.producer = None
    async with routed([prefilling], [decoded]) as stage:
        for _ in range(3):
            assert (await stage.ask())[0] == 200
        assert not any(asked_early(body) for body in stage.prefill[0].bodies)


async def test_the_answer_is_passed_on_when_the_prefill_has_ended_first(
    prefilling: Growing, decoding: Decoding
) -> None:
    async def late(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        stream = await streaming(request)
        assert prefilling.gate is not None
        prefilling.gate.set()
        await stage.prefill[0].until(lambda one: one.open == 0)
        await stream.write(whole())
        return stream

    decoding.early = late
    async with routed([prefilling], [decoding]) as stage:
        await known(stage, prefilling)
        assert await stage.ask() == (200, whole())
        assert len(stage.decode[0].bodies) == 1


@pytest.mark.parametrize("bad", [failing, failing_in_stream])
async def test_a_decode_server_that_cannot_load_what_a_prefill_lost_is_asked_again_with_the_ticket(
    prefilling: Growing, decoding: Decoding, bad: Any
) -> None:
    async with routed([prefilling], [decoding]) as stage:
        await known(stage, prefilling)
        prefilling.answer = lambda *_: _answer(TICKET)
        decoding.early = bad
        asking = asyncio.create_task(stage.ask())
        await stage.decode[0].until(lambda server: len(server.bodies) == 1 and server.open == 0)
        assert prefilling.gate is not None
        prefilling.gate.set()
        assert await asking == (200, whole())
        assert stage.decode[0].asked[1]["kv_transfer_params"] == TICKET
        assert len(stage.prefill[0].bodies) == 1
        await stage.server._router.close()
        assert stage.decode[0].releases == []
        for server in (stage.prefill[0], stage.decode[0]):
            role = "prefill" if server is stage.prefill[0] else "decode"
            name = f'kvd_router_server_failures_total{{role="{role}",server="{server.url}"}}'
            assert await stage.metric(name) == 0
        assert await counted(stage, "again") == 1


async def _answer(params: Any) -> web.StreamResponse:
    return web.json_response({"choices": [], "kv_transfer_params": params})


OTHER = [{"daemon": "other", "address": "tcp://h:2", "pool": "p"}]


@pytest.mark.parametrize("change", ["ticket", "producer"])
async def test_a_decode_server_that_was_told_wrong_is_asked_again_when_the_prefill_says_so(
    prefilling: Growing, decoding: Decoding, change: str
) -> None:
    decoding.early = stalled_before_its_first_token
    async with routed([prefilling], [decoding]) as stage:
        await known(stage, prefilling)
        if change == "ticket":
            prefilling.answer = lambda *_: _answer(TICKET)
        else:
            prefilling.producer = OTHER
        asking = asyncio.create_task(stage.ask())
        await stage.decode[0].until(lambda server: len(server.bodies) == 1)
        decoding.early = None
        assert prefilling.gate is not None
        prefilling.gate.set()
        assert await asking == (200, whole())
        await stage.decode[0].until(lambda server: server.aborted == 1)
        (_, again) = stage.decode[0].asked
        if change == "ticket":
            assert again["kv_transfer_params"] == TICKET
        else:
            assert again["kv_transfer_params"]["kvd_producer"] == OTHER
            await stage.ask()
            assert stage.decode[0].asked[2]["kv_transfer_params"]["kvd_producer"] == OTHER


async def stalled_before_its_first_token(server: Scripted, request: web.Request, body: Any) -> web.StreamResponse:
    await streaming(request)
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_decode_server_that_does_not_take_it_gets_the_request_after_the_prefill(
    prefilling: Growing, decoding: Decoding
) -> None:
    """One of an earlier release, for example."""
    async with routed([prefilling], [decoding]) as stage:
        await known(stage, prefilling)
        decoding.early = failing_in_stream
        asking = asyncio.create_task(stage.ask())
        await stage.decode[0].until(lambda server: len(server.bodies) == 1 and server.open == 0)
        assert prefilling.gate is not None
        prefilling.gate.set()
        assert await asking == (200, whole())
        assert [asked_early(body) for body in stage.prefill[0].bodies] == [True, False]
        assert [asked_early(body) for body in stage.decode[0].asked] == [True, False]


@pytest.mark.parametrize("bad", [vanishing, failing])
async def test_a_prefill_that_fails_is_done_by_another_server_and_the_decode_server_asked_anew(
    prefilling: Growing, decoding: Decoding, bad: Any
) -> None:
    async with routed([prefilling, prefilling], [decoding]) as stage:
        await stage.ask()
        await known(stage, prefilling)
        decoding.early = stalled_before_its_first_token
        prefilling.answer = bad
        asking = asyncio.create_task(stage.ask())
        await stage.decode[0].until(lambda server: len(server.bodies) == 1)
        assert prefilling.gate is not None
        prefilling.gate.set()
        assert await asking == (200, whole())
        assert all(server.bodies for server in stage.prefill)
        assert [asked_early(body) for body in stage.decode[0].asked] == [True, False]
        await stage.server._router.close()
        assert stage.decode[0].releases == []


async def test_a_prefill_that_fails_under_a_decode_server_that_says_so_first_is_the_prefill_servers_fault(
    prefilling: Growing, decoding: Decoding
) -> None:
    async with routed([prefilling, prefilling], [decoding]) as stage:
        await stage.ask()
        await known(stage, prefilling)
        decoding.early = failing_in_stream
        prefilling.answer = vanishing
        asking = asyncio.create_task(stage.ask())
        await stage.decode[0].until(lambda server: len(server.bodies) == 1 and server.open == 0)
        assert prefilling.gate is not None
        prefilling.gate.set()
        assert await asking == (200, whole())
        url = stage.decode[0].url
        assert await stage.metric(f'kvd_router_server_failures_total{{role="decode",server="{url}"}}') == 0
        assert await stage.metric('kvd_router_retries_total{role="prefill"}') == 1


async def test_a_refusal_of_the_prefill_server_is_the_answer(prefilling: Growing, decoding: Decoding) -> None:
    decoding.early = stalled_before_its_first_token
    async with routed([prefilling], [decoding]) as stage:
        await known(stage, prefilling)
        prefilling.answer = answering(400)
        assert prefilling.gate is not None
        prefilling.gate.set()
        assert (await stage.ask())[0] == 400
        await stage.decode[0].until(lambda server: server.open == 0)
        await stage.server._router.close()
        assert stage.decode[0].releases == []


async def test_a_refusal_of_the_decode_server_is_the_answer_and_the_prefill_is_ended(
    prefilling: Growing, decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LEAVE_SECONDS", 0.1)
    decoding.early = answering(400)
    async with routed([prefilling], [decoding]) as stage:
        await known(stage, prefilling)
        assert (await stage.ask())[0] == 400
        await stage.prefill[0].until(lambda server: server.aborted == 1)
        await stage.server._router.close()
        assert len(stage.decode[0].bodies) == 1


async def test_a_refusal_that_is_being_passed_on_is_not_begun_anew_by_the_prefill(
    prefilling: Growing, decoding: Decoding
) -> None:
    async def refusing(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answer = web.StreamResponse(status=400)
        await answer.prepare(request)
        await answer.write(b"no")
        assert prefilling.gate is not None
        prefilling.gate.set()
        await stage.prefill[0].until(lambda one: one.open == 0)
        await answer.write(b"!")
        return answer

    decoding.early = refusing
    async with routed([prefilling], [decoding]) as stage:
        await known(stage, prefilling)
        prefilling.answer = lambda *_: _answer(TICKET)
        assert await stage.ask() == (400, b"no!")


async def test_a_decode_server_that_never_got_the_request_leaves_the_prefill_to_another(prefilling: Growing) -> None:
    async with routed([prefilling], [decoded, decoded]) as stage:
        await known(stage, prefilling)
        for one in stage.server._decodes.all:
            if not one.turn:
                one.place = place("http://127.0.0.1:1")
        assert await stage.ask(prompt="other") == (200, whole())
        assert [len(server.bodies) for server in stage.prefill] == [1]
        (body,) = [body for server in stage.decode for body in server.bodies]
        assert asked_early(body)


@pytest.mark.parametrize("bad", [vanishing, hanging, answering(429)])
async def test_a_decode_server_that_is_lost_late_or_busy_has_its_prefill_ended_and_another_pair_tried(
    prefilling: Growing, bad: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LEAVE_SECONDS", 0.1)

    async def one_is_bad(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (bad if asked_early(body) else decoded)(server, request, body)

    async with routed([prefilling], [one_is_bad, one_is_bad], seconds=(1, 1)) as stage:
        await known(stage, prefilling)
        if bad is hanging:  # the prefill would be late before it
            assert prefilling.gate is not None
            prefilling.gate.set()
        assert await stage.ask(prompt="other") == (200, whole())
        await stage.prefill[0].until(lambda server: server.open == 0)
        assert [asked_early(body) for body in stage.prefill[0].bodies] == [True, False]
        assert sorted(len(server.asked) for server in stage.decode) == [1, 1]


async def test_a_request_whose_servers_are_lost_together_fails_where_no_other_can_prefill_it_and_leaves_no_offer(
    prefilling: Growing, decoding: Decoding, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "LEFT_PREFILLS", 0)
    beside = Early.beside

    async def after_both(early: Early, decoding: Any, has_begun: Any) -> bool:
        await asyncio.wait((decoding, early.answer))
        return await beside(early, decoding, has_begun)

    monkeypatch.setattr(Early, "beside", after_both)
    async with routed([prefilling], [decoding, decoding]) as stage:
        await known(stage, prefilling)
        prefilling.gate = None
        prefilling.answer = decoding.early = vanishing
        status, error = await stage.error(prompt="other")
        assert status == 502
        assert "1 more failed before" in error["message"]
        assert "an offer may stand" not in caplog.text


async def test_an_answer_that_says_the_prefill_is_late_may_take_the_time_of_both(
    prefilling: Growing, decoding: Decoding
) -> None:
    async def late(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(1.0)
        return await decoded(server, request, body)

    decoding.early = late
    async with routed([prefilling], [decoding], seconds=(MOMENT, 0.5)) as stage:
        await known(stage, prefilling)
        assert await stage.ask() == (200, whole())
        assert await counted(stage, "done") == 1


async def test_a_client_that_disconnects_ends_both_requests(
    prefilling: Growing, decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LEAVE_SECONDS", 0.1)
    decoding.early = stalled_before_its_first_token
    async with routed([prefilling], [decoding]) as stage:
        await known(stage, prefilling)
        await leave_once(stage, lambda server: len(server.bodies) == 1)
        await stage.decode[0].until(lambda server: server.aborted == 1)
        await stage.prefill[0].until(lambda server: server.aborted == 1)
        await stage.server._intake.idle.wait()
        await stage.server._router.close()
        assert stage.decode[0].releases == []


async def test_a_prefill_that_ends_when_its_client_is_gone_has_its_offer_released(
    prefilling: Growing, decoding: Decoding
) -> None:
    decoding.early = stalled_before_its_first_token
    async with routed([prefilling], [decoding]) as stage:
        await known(stage, prefilling)
        await leave_once(stage, lambda server: len(server.bodies) == 1)
        await stage.server._intake.idle.wait()
        assert prefilling.gate is not None
        prefilling.gate.set()
        await stage.decode[0].until(lambda server: len(server.releases) == 1)
        assert asked_early(stage.decode[0].releases[0])


async def test_a_router_that_stops_releases_what_it_has_cancelled(
    prefilling: Growing, decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STOP_SECONDS", 0.0)
    monkeypatch.setattr(limits, "LEAVE_SECONDS", MOMENT)
    decoding.early = stalled_before_its_first_token
    async with routed([prefilling], [decoding]) as stage:
        await known(stage, prefilling)
        asking = asyncio.create_task(stage.ask(prompt="other"))
        await stage.decode[0].until(lambda server: server.open == 1)
        closing = asyncio.Event()
        close = stage.server._router.close

        async def noted() -> None:
            closing.set()
            await close()

        monkeypatch.setattr(stage.server._router, "close", noted)
        stopping = asyncio.create_task(stage.server.__aexit__(None, None, None))
        await closing.wait()
        assert prefilling.gate is not None
        prefilling.gate.set()
        await stopping
        assert len(stage.decode[0].releases) == 1
        assert stage.prefill[0].aborted == 0
        with pytest.raises(aiohttp.ClientError):
            await asking


async def test_the_ticket_of_a_prefill_whose_request_was_computed_elsewhere_is_released(
    prefilling: Growing, decoding: Decoding, computed: Any
) -> None:
    async with routed([prefilling], [decoding, stalled]) as stage:
        await known(stage, prefilling)
        prefilling.answer = lambda *_: _answer(TICKET)
        decoding.early = computed
        for one in stage.server._decodes.all:
            one.turn = int(one.url != stage.decode[0].url)
        assert (await stage.ask(prompt="other"))[0] == 200
        await asyncio.wait_for(stage.server._router.close(), MOMENT)
        assert [body["kv_transfer_params"] for server in stage.decode for body in server.releases] == [TICKET]


async def test_a_request_that_ends_servers_gets_to_no_more_of_them_by_releases_while_it_is_tried_on(
    prefilling: Growing,
) -> None:
    again = asyncio.Event()

    async def prefill(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body["prompt"] == "bad" and not asked_early(body):
            await again.wait()
        return await prefilling(server, request, body)

    async def decode(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (vanishing if body["prompt"] == "bad" else decoded)(server, request, body)

    def got_it(servers: list[Scripted]) -> list[Scripted]:
        return [server for server in servers if any(body["prompt"] == "bad" for body in server.bodies)]

    async with routed([prefill] * limits.ATTEMPTS, [decode] * 3 * limits.ATTEMPTS) as stage:
        for _ in stage.prefill:
            assert (await stage.ask())[0] == 200
        prefilling.gate = asyncio.Event()
        asking = asyncio.create_task(stage.ask(prompt="bad"))
        await until(lambda: len(got_it(stage.prefill)) == 2)
        prefilling.gate.set()
        await until(lambda: sum(server.open for server in stage.prefill) == 1)
        for _ in range(4):  # so that the request is not next where a release would have been
            assert (await stage.ask())[0] == 200
        again.set()
        assert (await asking)[0] == 502
        await asyncio.wait_for(stage.server._router.close(), MOMENT)
        assert len(got_it(stage.decode)) == limits.ATTEMPTS


async def test_nothing_of_a_prefills_answer_is_kept_while_its_request_is_decoded_but_its_parameters(
    prefilling: Growing, decoding: Decoding, computed: Any
) -> None:
    """It may have the prompt's tokens, and nothing counts it."""
    held: list[Whole] = []

    async def looking(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answer = await computed(server, request, body)
        held.extend(one for one in gc.get_objects() if type(one) is Whole)  # isinstance() asks each object
        return answer

    gc.collect()  # those of tests before
    async with routed([prefilling], [decoding]) as stage:
        await known(stage, prefilling)
        decoding.early = looking
        assert (await stage.ask(prompt="other"))[0] == 200
        assert held == []


async def test_where_the_daemons_are_is_learned_from_a_prefill_that_ends_under_its_decode_server(
    prefilling: Growing, decoding: Decoding, computed: Any
) -> None:
    async with routed([prefilling], [decoding]) as stage:
        await known(stage, prefilling)
        prefilling.producer = OTHER
        decoding.early = computed
        assert (await stage.ask(prompt="other"))[0] == 200
        await stage.server._router.close()
        decoding.early = None
        assert (await stage.ask(prompt="another"))[0] == 200
        assert stage.decode[0].asked[-1]["kv_transfer_params"]["kvd_producer"] == OTHER


@pytest.mark.parametrize("bad", [failing, failing_in_stream])
async def test_a_prefill_whose_decode_server_has_failed_may_end_when_its_client_is_gone(
    prefilling: Growing, decoding: Decoding, bad: Any
) -> None:
    decoding.early = bad
    async with routed([prefilling], [decoding]) as stage:
        await known(stage, prefilling)
        prefilling.answer = lambda *_: _answer(TICKET)
        await leave_once(
            stage,
            lambda server: len(server.bodies) == 1 and server.open == 0,
            lambda router: router._decode.all[0].in_flight == 0,
        )
        await stage.server._intake.idle.wait()
        assert prefilling.gate is not None
        prefilling.gate.set()
        await stage.decode[0].until(lambda server: len(server.releases) == 1)
        assert stage.decode[0].releases[0]["kv_transfer_params"] == TICKET


async def test_an_offer_that_is_left_without_room_is_counted(
    prefilling: Growing, decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CLEANUP_BYTES", 0)
    decoding.early = stalled_before_its_first_token
    async with routed([prefilling], [decoding]) as stage:
        await known(stage, prefilling)
        assert prefilling.gate is not None
        prefilling.gate.set()
        await leave_once(stage, lambda server: server.open == 1, lambda router: router._prefill.all[0].in_flight == 0)
        await stage.server._intake.idle.wait()
        assert await stage.metric('kvd_router_releases_total{outcome="failed"}') == 1


async def test_a_prefill_server_whose_answer_comes_after_the_decode_servers_has_served(
    prefilling: Growing, decoding: Decoding
) -> None:
    async with routed([prefilling], [decoding]) as stage:
        await known(stage, prefilling)
        (server,) = stage.server._router._prefill.all
        server.failures = 3
        assert (await stage.ask(prompt="other"))[0] == 200
        assert (server.failures, server.rests_until) == (0, 0.0)
