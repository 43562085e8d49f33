"""One request's life: prefilled here, decoded there, tried again until its first token, and never left behind."""

import asyncio
import contextlib
import json
import socket
import time

import aiohttp
import pytest
from aiohttp import web

from kvd.router import limits
from kvd.router.answer import ServerFailed
from kvd.router.clients.http import HttpServer
from kvd.router.engines import place
from kvd.router.servers import Servers, rest
from kvd.router.upstream import Timeouts, Upstream
from tests.router.scripted import (
    BODY,
    DONE,
    PARAMS,
    PATH,
    Answering,
    Scripted,
    Stage,
    answering,
    broken_off,
    decoded,
    empty,
    event,
    failing,
    failing_after_role,
    failing_in_stream,
    hanging,
    pinging,
    prefilled,
    refusing,
    routed,
    scripted,
    stalled,
    streaming,
    too_large,
    until,
    vanishing,
    without_params,
)
from tests.support.patience import MOMENT


async def test_a_stream_passes_byte_for_byte_in_order() -> None:
    async with routed([prefilled], [decoded]) as stage:
        status, said = await stage.ask(max_tokens=500)
        assert status == 200
        assert said == b"".join(event(number) for number in range(500)) + DONE
        assert await stage.metric('kvd_router_requests_total{outcome="done"}') == 1
        assert await stage.metric("kvd_router_first_token_seconds_count") == 1


async def test_a_beam_search_is_computed_by_a_decode_server_alone() -> None:
    async with routed([prefilled], [decoded]) as stage:
        assert await stage.ask(stream=False, use_beam_search=True) == (200, b'{"choices": [{"text": "t1"}]}')
        assert stage.prefill[0].bodies == []
        assert stage.decode[0].bodies == [BODY | {"stream": False, "use_beam_search": True}]
        for number, no in enumerate((False, 0, "off"), start=1):
            assert (await stage.ask(use_beam_search=no))[0] == 200
            assert len(stage.prefill[0].bodies) == number


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
async def test_a_prefill_is_for_one_token_and_its_parameters_reach_the_decode_server_unchanged(path: str) -> None:
    asked = {"min_tokens": 2, "stream_options": {"include_usage": True}, "max_completion_tokens": 3}
    async with routed([prefilled], [decoded]) as stage:
        await stage.ask(path, **asked)
        (first,), (second,) = stage.prefill[0].bodies, stage.decode[0].bodies
        assert stage.prefill[0].paths == stage.decode[0].paths == [path]
    assert second == BODY | asked | {"kv_transfer_params": PARAMS}
    sent = first.pop("kv_transfer_params")
    assert sent["do_remote_decode"] is True
    assert "kvd_consumers" not in sent
    wanted = BODY | {"max_tokens": 1, "max_completion_tokens": 1, "stream": False}
    assert first == wanted


async def test_one_prefill_is_offered_to_as_many_consumers_as_completions_are_asked_for() -> None:
    async with routed([prefilled], [decoded]) as stage:
        await stage.ask(n=3)
        (first,), (second,) = stage.prefill[0].bodies, stage.decode[0].bodies
    assert (first["n"], first["kv_transfer_params"]["kvd_consumers"]) == (1, 3)
    assert second["n"] == 3


async def test_headers_of_the_client_reach_both_servers_with_one_request_id() -> None:
    async with routed([prefilled], [decoded]) as stage:
        headers = {"Authorization": "Bearer x", "Connection": "keep-alive, X-Hop", "X-Hop": "1"}
        data = json.dumps(BODY).encode()
        async with stage.session.post(stage.url + PATH, data=data, headers=headers) as response:
            await response.read()
        (first,), (second,) = stage.prefill[0].headers, stage.decode[0].headers
    assert first["Authorization"] == second["Authorization"] == "Bearer x"
    assert first["X-Request-Id"] == second["X-Request-Id"]
    assert first["Content-Type"] == second["Content-Type"] == "application/json"
    assert "X-Hop" not in first


@pytest.mark.parametrize("length", [10, limits.HEADER_BYTES - 100])
async def test_a_server_that_repeats_a_clients_header_has_not_failed(length: int) -> None:
    """As vLLM does with `--enable-request-id-headers`."""

    async def repeating(server: Scripted, request, body):
        answer = web.json_response({"choices": [{"text": "t1"}], "kv_transfer_params": PARAMS})
        answer.headers["X-Request-Id"] = request.headers["X-Request-Id"]
        return answer

    async with routed([repeating], [repeating]) as stage:
        assert (await stage.ask(headers={"X-Request-Id": "a" * length}))[0] == 200
        assert stage.server._router._prefill.all[0].failures == stage.server._decodes.all[0].failures == 0


@pytest.mark.parametrize("name", ["X-data-parallel-rank", "X-Vllm-Priority", "content-encoding"])
async def test_headers_that_are_not_for_clients_to_set_reach_no_server(name: str) -> None:
    async with routed([prefilled], [decoded]) as stage:
        data, headers = json.dumps(BODY).encode(), {name: "1", "X-Other": "1"}
        async with stage.session.post(stage.url + PATH, data=data, headers=headers) as response:
            assert response.status == 200
        async with stage.session.get(stage.url + "/v1/models", headers=headers) as response:
            assert response.status == 200
        found = [*stage.prefill[0].headers, *stage.decode[0].headers]
        assert [name in one for one in found] == [False] * 2
        assert [one["X-Other"] for one in found] == ["1"] * 2


async def test_an_answer_that_is_not_streamed_and_has_no_body_is_tried_elsewhere() -> None:
    async with routed([prefilled], [empty, decoded]) as stage:
        assert await stage.ask(stream=False) == (200, b'{"choices": [{"text": "t1"}]}')


async def test_an_answer_that_is_not_streamed_passes_too() -> None:
    async with routed([prefilled], [decoded]) as stage:
        assert await stage.ask(stream=False) == (200, b'{"choices": [{"text": "t1"}]}')


@pytest.mark.parametrize("bad", [failing, vanishing, without_params])
async def test_a_prefill_that_fails_is_tried_on_another_server(bad) -> None:
    async with routed([bad, prefilled], [decoded]) as stage:
        status, said = await stage.ask()
        assert (status, said[-len(DONE) :]) == (200, DONE)
        assert len(stage.prefill[0].bodies) == len(stage.prefill[1].bodies) == 1
        assert await stage.metric('kvd_router_retries_total{role="prefill"}') == 1


@pytest.mark.parametrize("bad", [failing, vanishing, failing_in_stream, failing_after_role, empty])
async def test_a_decode_that_fails_before_its_first_token_is_tried_on_another_pair_with_a_new_prefill(bad) -> None:
    async with routed([prefilled], [bad, decoded]) as stage:
        status, said = await stage.ask()
        assert (status, said[-len(DONE) :]) == (200, DONE)
        assert len(stage.prefill[0].bodies) == 2
        assert len(stage.decode[0].asked) == len(stage.decode[1].asked) == 1


async def test_what_a_kept_connection_swallows_as_it_is_closed_is_sent_again_to_the_same_server() -> None:
    """A server whose time for an idle connection is over closes it just as the next request comes."""

    def once(answering):
        served = set()

        async def answer(server, request, body):
            if request.transport in served:
                return await vanishing(server, request, body)
            served.add(request.transport)
            return await answering(server, request, body)

        return answer

    async with routed([once(prefilled)], [once(decoded)]) as stage:
        for _ in range(4):  # what is sent again has a connection of its own, which is not kept
            assert (await stage.ask())[0] == 200
        assert len(stage.prefill[0].bodies) == len(stage.decode[0].bodies) == 1 + 2 + 1 + 2
        for role, server in (("prefill", stage.prefill[0]), ("decode", stage.decode[0])):
            assert await stage.metric(f'kvd_router_server_failures_total{{role="{role}",server="{server.url}"}}') == 0


async def test_a_request_for_which_a_server_closes_its_connection_is_sent_there_twice_however_many_are_kept() -> None:
    kept = asyncio.Event()

    async def answer(server, request, body):
        if body["prompt"] == "bad":
            return await vanishing(server, request, body)
        if server.open == 20:
            kept.set()
        await kept.wait()
        return await prefilled(server, request, body)

    async with routed([answer], [decoded]) as stage:
        await asyncio.gather(*(stage.ask() for _ in range(20)))
        status, error = await stage.error(prompt="bad")
        assert (status, error["code"]) == (502, "peer_lost")
        assert sum(body["prompt"] == "bad" for body in stage.prefill[0].bodies) == 2


async def test_an_offer_that_no_decode_server_has_seen_is_taken_by_another_one() -> None:
    async with routed([prefilled], [decoded, decoded]) as stage:
        stage.server._decodes.all[0].place = place("http://127.0.0.1:1")
        status, _ = await stage.ask()
        assert status == 200
        assert len(stage.prefill[0].bodies) == 1


@pytest.mark.parametrize("count", [1, 2])
async def test_while_no_decode_server_can_be_reached_no_prompt_is_computed(count: int) -> None:
    async with routed([prefilled], [decoded] * count) as stage:
        places = [server.place for server in stage.server._decodes.all]
        for server in stage.server._decodes.all:
            server.place = place("http://127.0.0.1:1")
        for _ in range(4):
            status, error = await stage.error()
            assert (status, error["code"]) == (502, "peer_lost")
            assert "cannot be reached: Connect" in error["message"]
        assert len(stage.prefill[0].bodies) == 1
        stage.server._decodes.all[-1].place = places[-1]
        assert [(await stage.ask())[0] for _ in range(2)] == [200, 200]
        assert len(stage.prefill[0].bodies) == 3


async def test_while_a_decode_servers_host_answers_nobody_no_prompt_is_computed(monkeypatch) -> None:
    monkeypatch.setattr(limits, "CONNECT_SECONDS", 0.2)
    async with routed([prefilled], [decoded]) as stage:
        (decode,) = stage.server._decodes.all
        port = int(decode.url.rpartition(":")[2])
        decode.place = place(f"http://127.0.0.2:{port}")
        with silent("127.0.0.2", port):
            for _ in range(3):
                status, error = await stage.error()
                assert (status, error["code"]) == (502, "peer_lost")
                assert "cannot be reached" in error["message"]
        assert len(stage.prefill[0].bodies) == 1


async def test_a_decode_server_that_is_back_is_found_among_many_that_are_not() -> None:
    """Each request looks for three of them, but not all for the same three."""
    async with routed([prefilled], [decoded] * 4) as stage:
        *gone, back = stage.server._decodes.all
        now = time.monotonic()
        for server in gone:
            server.place = place("http://127.0.0.1:1")
            rest(server, now)
        rest(back, now)
        back.rests_until += 600.0
        assert 200 in [(await stage.ask())[0] for _ in range(2)]


@pytest.mark.parametrize("rested", [True, False])
async def test_the_decode_server_that_was_reached_gets_the_request(rested: bool) -> None:
    """Though others have rested before the prompt is prefilled, or rest no longer when it is."""
    goes_on = asyncio.Event()

    async def late(server: Scripted, request, body):
        await goes_on.wait()
        return await prefilled(server, request, body)

    async with routed([late], [decoded] * 4) as stage:
        _, *gone = stage.server._decodes.all
        for server in gone:
            server.place = place("http://127.0.0.1:1")
        for server in stage.server._decodes.all:
            rest(server, time.monotonic() - limits.REST_SECONDS * rested)
        asking = asyncio.create_task(stage.ask())
        await stage.prefill[0].until(lambda server: server.open == 1)
        for server in gone:
            server.rests_until = 0.0
        goes_on.set()
        assert (await asking)[0] == 200
        assert len(stage.decode[0].asked) == 1


async def test_a_decode_server_at_the_port_of_its_scheme_is_reached(monkeypatch) -> None:
    connected: list[tuple[str, int]] = []

    async def connect(addr_infos, **_):
        connected.extend(address[:2] for *_, address in addr_infos)
        raise ConnectionRefusedError

    monkeypatch.setattr("aiohttp.connector.aiohappyeyeballs.start_connection", connect)
    looked_up = names(monkeypatch, "192.0.2.1")
    async with Upstream(Timeouts(1.0, 1.0)) as upstream:
        for url in ("http://decode", "https://decode", "http://[::1]:8000"):
            with pytest.raises(ServerFailed, match="cannot be reached"):
                await upstream.reach(*Servers("decode", [url]).all)
    assert connected == [("192.0.2.1", 80), ("192.0.2.1", 443), ("::1", 8000)]
    assert looked_up == ["decode", "decode"]


def names(monkeypatch, *addresses: str) -> list[str]:
    """Every name has these addresses. Returns what is looked up."""
    looked_up = []

    async def resolve(self, host: str, port: int = 0, family: int = 0):
        looked_up.append(host)
        await asyncio.sleep(0)
        shared = {"hostname": host, "port": port, "family": socket.AF_INET, "proto": 0, "flags": 0}
        return [shared | {"host": address} for address in addresses]

    monkeypatch.setattr("aiohttp.ThreadedResolver.resolve", resolve)
    return looked_up


async def test_a_decode_server_is_reached_at_any_of_its_addresses(monkeypatch) -> None:
    """As requests are, to which an address that is silent costs a moment."""
    looked_up = names(monkeypatch, "127.0.0.2", "127.0.0.1")
    async with scripted(decoded) as server:
        port = int(server.url.rpartition(":")[2])
        with silent("127.0.0.2", port):
            async with Upstream(Timeouts(MOMENT, MOMENT)) as upstream:
                await upstream.reach(*Servers("decode", [f"http://decode.test:{port}"]).all)
    assert looked_up == ["decode.test"]


@contextlib.contextmanager
def silent(host: str, port: int):
    """An address that answers nobody who connects."""
    with contextlib.ExitStack() as stack:
        listener, *clients = (stack.enter_context(socket.socket()) for _ in range(4))
        listener.bind((host, port))
        listener.listen(0)
        for client in clients:  # fill its backlog
            client.setblocking(False)
            client.connect_ex((host, port))
        yield


async def test_many_requests_look_a_decode_servers_name_up_once(monkeypatch) -> None:
    """Lookups have a few threads, and many of them would take longer than a connection may."""
    looked_up = names(monkeypatch, "127.0.0.1")
    async with scripted(decoded) as server, Upstream(Timeouts(MOMENT, MOMENT)) as upstream:
        (named,) = Servers("decode", [server.url.replace("127.0.0.1", "decode.test")]).all
        await asyncio.gather(*(upstream.reach(named) for _ in range(20)))
    assert looked_up == ["decode.test"]


async def test_a_decode_server_that_does_not_take_a_connection_is_said_not_to_answer(monkeypatch) -> None:
    monkeypatch.setattr(limits, "CONNECT_SECONDS", 0.1)
    async with scripted(decoded) as server, Upstream(Timeouts(MOMENT, MOMENT)) as upstream:
        port = int(server.url.rpartition(":")[2])
        with silent("127.0.0.2", port), pytest.raises(ServerFailed, match="reached: it does not answer; is") as failed:
            await upstream.reach(*Servers("decode", [f"http://127.0.0.2:{port}"]).all)
    assert failed.value.lost


async def test_a_server_that_failed_rests(monkeypatch) -> None:
    monkeypatch.setattr("kvd.router.servers.REST_SECONDS", 600.0)
    async with routed([prefilled], [failing, decoded]) as stage:
        for _ in range(4):
            assert (await stage.ask())[0] == 200
        assert len(stage.decode[0].bodies) == 1
        assert len(stage.decode[1].asked) == 4


@pytest.mark.parametrize("bad", [failing, without_params, too_large, answering(429), hanging])
async def test_servers_that_fail_one_request_all_alike_do_not_rest_for_it(bad, monkeypatch) -> None:
    """It may be one that no server can serve: a client could put all to rest with it."""
    monkeypatch.setattr(limits, "PREFILL_ANSWER_BYTES", 1000)

    async def only_the_odd_one(server: Scripted, request, body):
        return await (bad if body["prompt"] == "odd" else prefilled)(server, request, body)

    async with routed([only_the_odd_one] * 4, [decoded], seconds=(0.5, 30)) as stage:
        assert (await stage.ask(prompt="odd"))[0] >= 400
        stage.server._upstream._prefill = aiohttp.ClientTimeout()
        for number in range(8):
            assert (await stage.ask(prompt=str(number)))[0] == 200
        even = [len([body for body in server.bodies if body["prompt"] != "odd"]) for server in stage.prefill]
        assert even == [2] * 4


@pytest.mark.parametrize("bad", [vanishing, failing, without_params, too_large, answering(429), hanging])
async def test_a_server_that_fails_what_another_one_serves_rests(bad, monkeypatch) -> None:
    monkeypatch.setattr("kvd.router.servers.REST_SECONDS", 600.0)
    monkeypatch.setattr(limits, "PREFILL_ANSWER_BYTES", 1000)
    async with routed([bad, prefilled], [decoded], seconds=(3, 30)) as stage:
        for _ in range(4):
            assert (await stage.ask())[0] == 200
        assert [len(server.bodies) for server in stage.prefill] == [1, 4]


async def test_a_server_that_keeps_failing_gets_one_request_after_each_of_its_pauses(clock) -> None:
    async with routed([failing, prefilled], [decoded]) as stage:
        for pause in (0.0, 1.0, 2.0, 4.0):
            asked = len(stage.prefill[0].bodies)
            clock.now += pause * limits.REST_SECONDS
            await asyncio.gather(*(stage.ask(prompt=f"{pause} {number}") for number in range(1 + 9 * (pause > 0))))
            assert len(stage.prefill[0].bodies) == asked + 1
            clock.now += 0.9 * (pause or 0.5) * limits.REST_SECONDS
            await stage.ask()
            assert len(stage.prefill[0].bodies) == asked + 1
            clock.now -= 0.9 * (pause or 0.5) * limits.REST_SECONDS


@pytest.mark.parametrize("bad", [refusing, hanging, failing, answering(429)])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_server_is_not_out_of_use_for_requests_that_do_not_show_whether_it_fails(
    role: str, bad, monkeypatch
) -> None:
    """It refuses them, their clients leave at once, or no server serves them."""
    monkeypatch.setattr(limits, "LEAVE_SECONDS", 0.05)
    monkeypatch.setattr(limits, "RELEASE_SECONDS", 0.05)

    async def of_the_bad(server: Scripted, request, body):
        good = prefilled if role == "prefill" else decoded
        return await (bad if body["prompt"].startswith("bad") else good)(server, request, body)

    prefill, decode = ([of_the_bad] * 2, [decoded]) if role == "prefill" else ([prefilled], [of_the_bad] * 2)
    async with routed(prefill, decode) as stage:
        failed, _ = (stage.server._router._prefill if role == "prefill" else stage.server._decodes).all
        scripts = stage.prefill if role == "prefill" else stage.decode
        rest(failed, time.monotonic() - limits.REST_SECONDS)
        for number in range(4):
            asking = asyncio.create_task(stage.ask(prompt=f"bad {number}"))
            if bad is hanging:
                await until(lambda: sum(script.open for script in scripts) == 1)
                asking.cancel()
                await until(lambda: not any(script.open for script in scripts))
                await stage.server._router._cleanup.close()
            else:
                assert (await asking)[0] >= 400
        for number in range(4):
            assert (await stage.ask(prompt=f"good {number}"))[0] == 200
        assert failed.failures == 0


@pytest.mark.parametrize(("waits", "failures"), [(0.9 * limits.REST_SECONDS, 1), (limits.REST_SECONDS, 2)])
async def test_a_server_that_makes_clients_leave_rests_for_longer(
    waits: float, failures: int, clock, monkeypatch
) -> None:
    monkeypatch.setattr(limits, "LEAVE_SECONDS", 0.05)
    async with routed([hanging], [decoded]) as stage:
        (failed,) = stage.server._router._prefill.all
        rest(failed, clock.now - limits.REST_SECONDS)
        asking = asyncio.create_task(stage.ask())
        await stage.prefill[0].until(lambda server: server.open == 1)
        clock.now += waits
        asking.cancel()
        await stage.prefill[0].until(lambda server: server.open == 0)
        assert failed.failures == failures


@pytest.mark.parametrize("bad", [refusing, failing, answering(429)])
async def test_a_server_that_takes_long_for_an_answer_that_shows_nothing_rests_no_longer(bad, clock) -> None:
    async def late(server: Scripted, request, body):
        clock.now += 1.1 * limits.REST_SECONDS
        return await bad(server, request, body)

    async with routed([late], [decoded]) as stage:
        (failed,) = stage.server._router._prefill.all
        rest(failed, clock.now - limits.REST_SECONDS)
        assert (await stage.ask())[0] >= 400
        assert (failed.failures, failed.rests_until) == (1, 0.0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [429, 500])
async def test_a_failure_whose_text_does_not_end_is_tried_elsewhere(status: int, stream: bool, monkeypatch) -> None:
    monkeypatch.setattr(limits, "REFUSAL_SECONDS", 0.2)

    async def endless(server: Scripted, request, body):
        answer = web.StreamResponse(status=status)
        await answer.prepare(request)
        while True:
            await answer.write(b" ")
            await asyncio.sleep(0.01)

    async with routed([prefilled], [endless, decoded]) as stage:
        assert (await stage.ask(stream=stream))[0] == 200
        await stage.decode[0].until(lambda server: server.open == 0)


async def test_nothing_is_tried_again_after_the_first_token() -> None:
    async with routed([prefilled], [broken_off, decoded]) as stage:
        async with stage.session.post(stage.url + PATH, json=BODY) as response:
            assert response.status == 200
            said = event(0)
            assert await response.content.readexactly(len(said)) == said
            assert (await response.content.readuntil(b"}}")).startswith(b'data: {"error"')
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        assert len(stage.decode[1].bodies) == 0
        assert await stage.metric('kvd_router_requests_total{outcome="broken_off"}') == 1


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
async def test_a_stream_that_breaks_off_says_why_however_its_events_end(end: bytes, *, cut: bool) -> None:
    async def breaking_off(server: Scripted, request, body):
        stream = await streaming(request)
        said = event(0).replace(b"\n", end)
        await stream.write(said[:-1] if cut else said)
        if cut:
            await asyncio.sleep(0.05)  # so that the network cuts there
            await stream.write(said[-1:])
        request.transport.close()
        return stream

    async with routed([prefilled], [breaking_off]) as stage:
        async with stage.session.post(stage.url + PATH, json=BODY) as response:
            said = await response.content.readuntil(b"}}")
        assert said.startswith(event(0).replace(b"\n", end) + b'data: {"error"')


async def test_an_error_after_the_first_token_breaks_the_answer_off() -> None:
    async def failing_late(server: Scripted, request, body):
        stream = await streaming(request)
        await stream.write(event(0) + b'data: {"error": {"message": "no KV", "code": 500}}\n\n' + DONE)
        return stream

    async with routed([prefilled], [failing_late, decoded]) as stage:
        async with stage.session.post(stage.url + PATH, json=BODY) as response:
            assert response.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        assert len(stage.decode[1].bodies) == 0
        assert await stage.metric('kvd_router_requests_total{outcome="broken_off"}') == 1


def trickling(beginning: bytes, more: bytes) -> Answering:
    async def answer(server: Scripted, request: web.Request, body) -> web.StreamResponse:
        request.transport.write(beginning)
        while True:
            request.transport.write(more)
            await asyncio.sleep(0.05)

    return answer


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(trickling(b"HTTP/1.1 200 OK\r\nX: ", b"x"), id="in its head"),
        pytest.param(trickling(b"", b"HTTP/1.1 102 Processing\r\n\r\n"), id="before its head"),
        pytest.param(trickling(STREAM + b"1;", b"x"), id="before its first chunk"),
        pytest.param(trickling(b"HTTP/1.1 400 X\r\nContent-Length: 1000\r\n\r\n", b" "), id="in a refusal"),
    ],
)
async def test_a_server_that_says_nothing_byte_by_byte_is_late(bad, monkeypatch) -> None:
    monkeypatch.setattr(limits, "REFUSAL_SECONDS", 0.5)
    monkeypatch.setattr(limits, "RELEASE_SECONDS", 0.5)
    async with routed([prefilled], [bad], seconds=(MOMENT, 0.5)) as stage:
        status, error = await stage.error()
        assert (status, error["code"]) == (504, "deadline")
        failures = f'kvd_router_server_failures_total{{role="decode",server="{stage.decode[0].url}"}}'
        assert await stage.metric(failures) == 1


@pytest.mark.parametrize("status", [199, 201, 204, 301, 304, 500, 600])
async def test_an_answer_of_a_status_that_servers_do_not_have_is_a_failure(status: int) -> None:
    async def odd(server: Scripted, request: web.Request, body) -> web.StreamResponse:
        request.transport.write(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % status)
        request.transport.close()
        return web.Response()

    async with routed([odd, prefilled], [odd, decoded]) as stage:
        assert (await stage.ask())[0] == 200


@pytest.mark.parametrize("kind", [b"text/\x01plain", b"text/" + b"x" * 20_000, "text/\u00e4".encode()])
async def test_a_header_that_clients_could_not_read_is_not_passed_on(kind: bytes) -> None:
    async def odd(server: Scripted, request: web.Request, body) -> web.StreamResponse:
        request.transport.write(b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: 2\r\n\r\n{}" % kind)
        request.transport.close()
        return web.Response()

    async with (
        routed([prefilled], [odd, decoded]) as stage,
        stage.session.post(stage.url + PATH, json=BODY) as response,
    ):
        assert response.status == 200
        assert response.headers["Content-Type"] == "application/json"


@pytest.mark.parametrize("refuser", ["prefill", "decode"])
async def test_a_refusal_of_a_server_is_the_answer(refuser: str) -> None:
    answers = ([refusing], [decoded]) if refuser == "prefill" else ([prefilled], [refusing])
    async with routed(*answers) as stage:
        assert await stage.error() == (400, {"message": "too long", "code": 400})
        assert await stage.metric('kvd_router_requests_total{outcome="refused"}') == 1


@pytest.mark.parametrize("others", [[], [decoded]], ids=["alone", "beside another"])
@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
async def test_what_only_the_decode_server_refuses_has_its_offer_released(status: int, others) -> None:
    async with routed([prefilled], [answering(status, Retry_After="7"), *others]) as stage:
        async with stage.session.post(stage.url + PATH, json=BODY | {"n": 2}) as response:
            assert (response.status, await response.json()) == (status, {"error": {"code": status}})
            assert response.headers["Retry-After"] == "7"
        refuser, releaser = stage.decode[0], stage.decode[-1]
        await releaser.until(lambda server: len(server.releases) == 1)
        assert len(refuser.asked) == 1
        (body,) = releaser.releases
        assert body["kv_transfer_params"] == PARAMS
        assert (body["n"], body["temperature"], body["stream"]) == (2, 1, True)
        await stage.server._router.close()
        assert len(refuser.releases) == (0 if others else 1)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_server_that_has_enough_to_do_is_left_for_another(role: str) -> None:
    busy = answering(429, Retry_After="7")
    answers = ([busy, prefilled], [decoded]) if role == "prefill" else ([prefilled], [busy, decoded])
    async with routed(*answers) as stage:
        assert (await stage.ask())[0] == 200
        assert await stage.metric(f'kvd_router_retries_total{{role="{role}"}}') == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_if_all_servers_have_enough_to_do_the_client_hears_when_to_come_again(role: str) -> None:
    busy = [answering(429, Retry_After="7")] * 2
    async with routed(*((busy, [decoded]) if role == "prefill" else ([prefilled], busy))) as stage:
        async with stage.session.post(stage.url + PATH, json=BODY) as response:
            assert (response.status, await response.json()) == (429, {"error": {"code": 429}})
            assert response.headers["Retry-After"] == "7"
        assert await stage.metric('kvd_router_requests_total{outcome="refused"}') == 1


async def test_servers_that_are_overloaded_make_the_router_so() -> None:
    async with routed([answering(503)], [decoded]) as stage:
        async with stage.session.post(stage.url + PATH, json=BODY) as response:
            assert response.status == 503
            assert "Retry-After" in response.headers
        assert await stage.metric('kvd_router_requests_total{outcome="overloaded"}') == 1


@pytest.mark.parametrize("bad", [hanging, vanishing, failing, empty])
async def test_an_offer_is_released_that_a_decode_server_got_and_did_not_answer(bad) -> None:
    """It may have ended the request before its engine had it, which then lets go of nothing."""

    async def first(server: Scripted, request: web.Request, body) -> web.StreamResponse:
        stage.server._upstream._timeouts = Timeouts(MOMENT, MOMENT)  # the next one need not be quick
        return await bad(server, request, body)

    async with routed([prefilled], [first, decoded], seconds=(MOMENT, 3)) as stage:
        assert (await stage.ask())[0] == 200
        await stage.decode[1].until(lambda server: len(server.releases) == 1)
        assert stage.decode[1].releases[0]["kv_transfer_params"] == PARAMS
        await stage.server._router.close()
        assert stage.decode[0].releases == []
        assert await stage.metric('kvd_router_releases_total{outcome="done"}') == 1


@pytest.mark.parametrize("bad", [vanishing, failing, answering(503)])
async def test_an_offer_is_released_by_a_decode_server_that_failed_if_there_is_no_other(bad) -> None:
    async def once_bad(server: Scripted, request, body):
        return await (bad if body in server.asked else decoded)(server, request, body)

    async with routed([prefilled], [once_bad]) as stage:
        assert (await stage.ask())[0] in {502, 503}
        await stage.server._router.close()
        assert stage.decode[0].releases[0]["kv_transfer_params"] == PARAMS
        assert await stage.metric('kvd_router_releases_total{outcome="done"}') == 1


@pytest.mark.parametrize("bad", [vanishing, failing])
async def test_a_request_that_no_decode_server_serves_gets_to_no_more_of_them_by_its_releases(bad) -> None:
    """It may be what they fail of."""
    async with routed([prefilled] * limits.ATTEMPTS, [bad] * 3 * limits.ATTEMPTS) as stage:
        assert (await stage.ask())[0] == 502
        await stage.server._router.close()
        assert sum(bool(server.bodies) for server in stage.decode) == limits.ATTEMPTS
        assert await stage.metric('kvd_router_releases_total{outcome="failed"}') == limits.ATTEMPTS


@pytest.mark.parametrize("bad", [failing_in_stream, failing_after_role])
async def test_an_offer_is_released_though_a_decode_server_says_an_error(bad) -> None:
    """VLLM refuses some of what only its decode gets in the stream, before its engine has the request: logprobs."""
    async with routed([prefilled], [bad, decoded]) as stage:
        assert (await stage.ask())[0] == 200
        await stage.server._router.close()
        assert [body["kv_transfer_params"] for body in stage.decode[1].releases] == [PARAMS]
        assert stage.decode[0].releases == []


@pytest.mark.parametrize("streamed", [True, False])
async def test_an_offer_is_released_whose_client_leaves_before_the_decode_server_answers(streamed: bool) -> None:
    async with routed([prefilled], [hanging, stalled]) as stage:
        asking = asyncio.create_task(stage.ask(stream=streamed))
        await stage.decode[0].until(lambda server: len(server.bodies) == 1)
        asking.cancel()
        await stage.decode[0].until(lambda server: server.aborted == 1)
        await stage.decode[1].until(lambda server: server.aborted == 1)
        assert stage.decode[1].releases[0]["kv_transfer_params"] == PARAMS


async def test_all_offers_of_a_request_are_released_by_one_server_and_count_as_one(monkeypatch) -> None:
    """If the request brings servers down, no further one gets it."""
    fails = iter([vanishing, vanishing, hanging])

    async def answer(server: Scripted, request, body):
        return await (next(fails) if body in server.asked else decoded)(server, request, body)

    async with routed([prefilled], [answer] * 6) as stage:
        monkeypatch.setattr(limits, "CLIENT_CLEANUP_BYTES", len(json.dumps(BODY)) + 100)
        asking = asyncio.create_task(stage.ask())
        await until(lambda: sum(len(server.asked) for server in stage.decode) == 3)
        asking.cancel()
        await stage.server._intake.idle.wait()
        await stage.server._router.close()
        assert sorted(len(server.releases) for server in stage.decode) == [0] * 5 + [3]


async def test_all_offers_that_a_server_had_when_it_died_are_released(monkeypatch) -> None:
    """However few of those may be left whose clients have left."""
    monkeypatch.setattr(limits, "CLIENT_LEFT_PREFILLS", 1)
    died = asyncio.Event()

    async def dying(server: Scripted, request, body):
        await died.wait()
        return await vanishing(server, request, body)

    async with routed([prefilled], [dying, decoded]) as stage:
        asking = [asyncio.create_task(stage.ask()) for _ in range(8)]
        await until(lambda: stage.decode[0].open + len(stage.decode[1].asked) == 8)
        lost = stage.decode[0].open
        died.set()
        assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 8
        await stage.server._router.close()
        assert len(stage.decode[1].releases) == lost > 1


async def test_a_prefill_server_without_a_connector_is_named() -> None:
    async with routed([without_params], [decoded]) as stage:
        status, error = await stage.error()
        assert (status, error["type"]) == (502, "server_error")
        assert stage.prefill[0].url in error["message"]
        assert "--kv-transfer-config" in error["message"]
        assert stage.decode[0].bodies == []


async def test_an_error_says_what_failed_and_where() -> None:
    async with routed([prefilled], [failing, failing]) as stage:
        status, error = await stage.error()
        assert (status, error["code"]) == (502, "peer_lost")
        assert "decode server http://127.0.0.1:" in error["message"]
        assert "no KV" in error["message"]
        assert "1 more failed before" in error["message"]
        stage.server._decodes.all[0].place = stage.server._decodes.all[1].place = place("http://127.0.0.1:1")
        _, error = await stage.error()
        assert "cannot be reached" in error["message"]


@pytest.mark.parametrize(
    ("prefill", "decode", "where", "seconds"),
    [
        pytest.param(hanging, decoded, "prefill", (0.2, MOMENT), id="a prefill that does not end"),
        pytest.param(prefilled, hanging, "decode", (MOMENT, 0.2), id="a decode without a first token"),
        pytest.param(prefilled, pinging, "decode", (MOMENT, 0.2), id="a decode with comments for tokens"),
    ],
)
async def test_each_stage_has_a_deadline(prefill, decode, where: str, seconds: tuple[float, float]) -> None:
    async with routed([prefill], [decode], seconds=seconds) as stage:
        late = stage.prefill[0] if where == "prefill" else stage.decode[0]
        while not late.bodies:  # a busy machine may take longer than the deadline to hand it over
            status, error = await stage.error()
            assert (status, error["code"]) == (504, "deadline")
            assert f"{where} server" in error["message"]
        await late.until(lambda server: server.aborted > 0 and server.open == 0)


async def test_an_answer_that_is_not_streamed_may_take_longer_than_the_time_between_two_tokens() -> None:
    async def slow(server: Scripted, request, body):
        await asyncio.sleep(0.5)  # nothing of it comes before its last token
        return await decoded(server, request, body)

    async with routed([prefilled], [slow, slow], seconds=(30, 0.1)) as stage:
        assert await stage.ask(stream=False) == (200, b'{"choices": [{"text": "t1"}]}')
        assert sum(len(server.bodies) for server in stage.prefill + stage.decode) == 2


async def test_a_stream_that_stalls_is_broken_off() -> None:
    async with routed([prefilled], [stalled], seconds=(MOMENT, 0.2)) as stage:
        begun = False
        while not begun:  # a busy machine may take longer than the deadline for the first token
            async with stage.session.post(stage.url + PATH, json=BODY) as response:
                begun = response.status == 200
                with pytest.raises(aiohttp.ClientPayloadError) if begun else contextlib.nullcontext():
                    await response.read()
        await stage.decode[0].until(lambda server: server.aborted > 0 and server.open == 0)


@pytest.mark.parametrize(
    ("prefill", "decode", "where"),
    [
        pytest.param(hanging, decoded, "prefill", id="while a long prefill runs"),
        pytest.param(prefilled, hanging, "decode", id="before its first token"),
        pytest.param(prefilled, stalled, "decode", id="in the middle of its tokens"),
    ],
)
async def test_a_client_that_disconnects_ends_its_requests_everywhere(prefill, decode, where, monkeypatch) -> None:
    monkeypatch.setattr(limits, "LEAVE_SECONDS", 0.1)
    monkeypatch.setattr(limits, "RELEASE_SECONDS", 0.1)
    requests = 2 if decode is hanging else 1  # the second one is to release the offer
    async with routed([prefill], [decode]) as stage:
        busy = stage.prefill[0] if where == "prefill" else stage.decode[0]
        asking = asyncio.create_task(stage.ask())
        await busy.until(lambda server: server.open == 1 and len(server.bodies) == 1)
        asking.cancel()
        await busy.until(lambda server: server.open == 0 and server.aborted == requests)
        await stage.server._intake.idle.wait()
        await stage.server._router.close()
        assert await stage.metric('kvd_router_requests_total{outcome="client_gone"}') == 1
        in_flight = [server.in_flight for servers in (stage.server._decodes,) for server in servers.all]
        assert in_flight == [0]


async def test_an_offer_that_no_decode_server_has_seen_is_released_when_its_client_is_gone() -> None:
    held = asyncio.Event()

    async with routed([prefilled], [stalled]) as stage:
        post = stage.server._upstream.post
        first = True

        def post_later(server, path, body, headers, sent, **more):
            nonlocal first
            if server.role == "decode" and first:
                first = False
                return _Never(held)
            return post(server, path, body, headers, sent, **more)

        stage.server._upstream.post = post_later
        asking = asyncio.create_task(stage.ask(n=2))
        await held.wait()
        asking.cancel()
        await stage.decode[0].until(lambda server: server.aborted == 1)
        (body,) = stage.decode[0].bodies
        assert body["kv_transfer_params"] == PARAMS
        assert (body["max_tokens"], body["n"], body["stream"]) == (1, 2, True)
    assert stage.server._router._cleanup._tasks == set()


async def test_a_release_does_not_end_before_the_engine_has_it(monkeypatch) -> None:
    """VLLM sends the head of an answer, and gives its engine the request only then."""
    monkeypatch.setattr(limits, "TAKEN_SECONDS", 600.0)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def late(server: Scripted, request, body):
        stream = await streaming(request)
        begun.set()
        await go_on.wait()
        await stream.write(event(0))
        await asyncio.Event().wait()

    async with routed([prefilled], [answering(400), late]) as stage:
        assert (await stage.ask())[0] == 400
        await begun.wait()
        for _ in range(10):
            await stage.get("/healthz")
        assert stage.decode[1].aborted == 0
        go_on.set()
        await stage.decode[1].until(lambda server: server.aborted == 1)
        await stage.server._router.close()
        assert await stage.metric('kvd_router_releases_total{outcome="done"}') == 1


async def test_a_release_whose_engine_is_slow_ends_after_a_moment(monkeypatch) -> None:
    monkeypatch.setattr(limits, "TAKEN_SECONDS", 0.1)

    async def slow(server: Scripted, request, body):
        await streaming(request)
        await asyncio.Event().wait()

    async with routed([prefilled], [answering(400), slow]) as stage:
        assert (await stage.ask())[0] == 400
        await stage.decode[1].until(lambda server: server.aborted == 1)
        await stage.server._router.close()
        assert await stage.metric('kvd_router_releases_total{outcome="done"}') == 1


def _prefilled_after(gone: asyncio.Event) -> Answering:
    """Prefills as soon as the client is `gone`."""

    async def late(server: Scripted, request, body):
        await gone.wait()
        return await prefilled(server, request, body)

    return late


async def _leave_in_prefill(stage: Stage, gone: asyncio.Event) -> None:
    asking = asyncio.create_task(stage.ask())
    await stage.prefill[0].until(lambda server: server.open == 1)
    asking.cancel()
    await stage.server._intake.idle.wait()
    gone.set()


async def test_a_prefill_that_ends_when_its_client_is_gone_has_its_offer_released() -> None:
    gone = asyncio.Event()
    async with routed([_prefilled_after(gone)], [stalled]) as stage:
        await _leave_in_prefill(stage, gone)
        await stage.decode[0].until(lambda server: server.aborted == 1)
        assert stage.decode[0].bodies == [BODY | {"max_tokens": 1, "kv_transfer_params": PARAMS}]
        await stage.server._router.close()
        assert await stage.metric('kvd_router_releases_total{outcome="done"}') == 1


@pytest.mark.parametrize("bad", [None, failing, answering(429), refusing, vanishing, empty, failing_in_stream])
async def test_an_offer_that_one_decode_server_does_not_release_is_released_by_another(bad) -> None:
    gone = asyncio.Event()
    async with routed([_prefilled_after(gone)], [bad or decoded, stalled]) as stage:
        if bad is None:
            stage.server._decodes.all[0].place = place("http://127.0.0.1:1")
        await _leave_in_prefill(stage, gone)
        await stage.decode[1].until(lambda server: server.aborted == 1)
        await stage.server._router.close()
        assert len(stage.decode[0].releases) == (bad is not None)
        assert await stage.metric('kvd_router_releases_total{outcome="done"}') == 1


async def test_offers_of_a_request_wait_once_for_servers_that_hang(monkeypatch) -> None:
    """With each of its offers it would take as long again, until they end by themselves."""
    monkeypatch.setattr(limits, "RELEASE_SECONDS", 0.2)

    async def bad(server: Scripted, request, body):
        return await (vanishing if body in server.asked else hanging)(server, request, body)

    async with routed([prefilled], [bad] * 3) as stage:
        assert (await stage.ask())[0] == 502
        await stage.server._router.close()
        assert [len(server.releases) for server in stage.decode] == [1, 1, 1]
        assert await stage.metric('kvd_router_releases_total{outcome="failed"}') == 3


async def test_an_offer_that_a_decode_server_hangs_with_is_released_by_another(monkeypatch) -> None:
    monkeypatch.setattr(limits, "RELEASE_SECONDS", 1.0)
    gone = asyncio.Event()
    async with routed([_prefilled_after(gone)], [hanging, stalled]) as stage:
        await _leave_in_prefill(stage, gone)
        await stage.decode[1].until(lambda server: server.aborted == 1)
        await stage.server._router.close()
        assert (stage.decode[0].aborted, len(stage.decode[0].releases)) == (1, 1)
        assert await stage.metric('kvd_router_releases_total{outcome="done"}') == 1


async def test_prefills_of_clients_that_are_gone_have_a_bound(monkeypatch, caplog) -> None:
    monkeypatch.setattr(limits, "LEFT_PREFILLS", 1)
    async with routed([hanging], [decoded]) as stage:
        asking = [asyncio.create_task(stage.ask()) for _ in range(3)]
        await stage.prefill[0].until(lambda server: server.open == 3)
        for task in asking:
            task.cancel()
        await stage.prefill[0].until(lambda server: server.aborted == 2)
        assert stage.prefill[0].open == 1
        assert caplog.text.count("an offer may stand until its ttl") == 2


async def test_a_prefill_that_was_left_takes_no_place_of_others_while_its_offer_is_released(monkeypatch) -> None:
    monkeypatch.setattr(limits, "LEFT_PREFILLS", 1)
    gone, released = asyncio.Event(), asyncio.Event()

    async def queueing(server: Scripted, request, body):
        await released.wait()
        return await decoded(server, request, body)

    async with routed([_prefilled_after(gone)], [queueing]) as stage:
        await _leave_in_prefill(stage, gone)
        await stage.decode[0].until(lambda server: len(server.releases) == 1)
        gone.clear()
        await _leave_in_prefill(stage, gone)
        await stage.decode[0].until(lambda server: len(server.releases) == 2)
        assert stage.prefill[0].aborted == 0
        released.set()
        await stage.server._router.close()
        assert await stage.metric('kvd_router_releases_total{outcome="done"}') == 2


async def test_bodies_of_clients_that_are_gone_have_a_bound_until_their_prefills_have_ended(monkeypatch) -> None:
    """They are in flight no more: who leaves again and again would fill the memory with them."""
    monkeypatch.setattr(limits, "CLEANUP_BYTES", 3000)
    monkeypatch.setattr(limits, "LEAVE_SECONDS", 600.0)
    gone = asyncio.Event()
    async with routed([_prefilled_after(gone)], [decoded]) as stage:
        asking = [asyncio.create_task(stage.ask(prompt="x" * 2000)) for _ in range(2)]
        await stage.prefill[0].until(lambda server: server.open == 2)
        for task in asking:
            task.cancel()
        await stage.prefill[0].until(lambda server: server.aborted == 1)
        assert 2000 < stage.server._router._cleanup._bytes.total < 3000
        gone.set()
        await stage.server._router.close()
        assert stage.server._router._cleanup._bytes.total == 0


@pytest.mark.parametrize(("bound", "most"), [("CLIENT_LEFT_PREFILLS", 1), ("CLIENT_CLEANUP_BYTES", 3000)])
async def test_a_client_that_leaves_again_and_again_takes_no_place_of_others(monkeypatch, bound, most) -> None:
    monkeypatch.setattr(limits, bound, most)
    monkeypatch.setattr(limits, "LEAVE_SECONDS", 600.0)
    gone = asyncio.Event()
    async with routed([_prefilled_after(gone)], [decoded]) as stage:
        data = json.dumps(BODY | {"prompt": "x" * 2000})
        other = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
        async with aiohttp.ClientSession(connector=other) as session:
            asking = [asyncio.create_task(session.post(stage.url + PATH, data=data)) for _ in range(3)]
            await stage.prefill[0].until(lambda server: server.open == 3)
            for task in asking:
                task.cancel()
            await stage.prefill[0].until(lambda server: server.aborted == 2)
        asking = [asyncio.create_task(stage.ask())]
        await stage.prefill[0].until(lambda server: server.open == 2)
        asking[0].cancel()
        await stage.server._intake.idle.wait()
        gone.set()
        await stage.server._router.close()
        assert sorted(len(body["prompt"]) for body in stage.decode[0].releases) == [len(BODY["prompt"]), 2000]
        assert not stage.server._router._cleanup._bytes._of


class _Never:
    """Connecting to a server that takes for ever."""

    def __init__(self, entered: asyncio.Event) -> None:
        self._entered = entered

    async def __aenter__(self):
        self._entered.set()
        await asyncio.Event().wait()

    async def __aexit__(self, *_):
        raise AssertionError


async def test_a_request_with_the_beginning_of_an_earlier_one_goes_to_the_same_pair() -> None:
    async with routed([prefilled] * 3, [decoded] * 3) as stage:
        messages = [{"role": "user", "content": "one"}]
        await stage.ask("/v1/chat/completions", messages=messages)
        served = [server for server in stage.prefill + stage.decode if server.bodies]
        await stage.ask("/v1/chat/completions", messages=[{"role": "user", "content": "other"}])
        for text in ("two", "three"):
            messages = [*messages, {"role": "user", "content": text}]
            await stage.ask("/v1/chat/completions", messages=messages)
        assert [sum("stream" in body for body in server.bodies) for server in served] == [3, 3]


async def test_requests_spread_over_servers_by_load() -> None:
    async with routed([prefilled, prefilled], [stalled, stalled]) as stage:
        asking = [asyncio.create_task(stage.ask(prompt=f"other {number}")) for number in range(6)]
        for server in stage.decode:
            await server.until(lambda one: one.open == 3)
        for task in asking:
            task.cancel()


async def test_a_router_that_stops_lets_requests_end(monkeypatch) -> None:
    monkeypatch.setattr(limits, "STOP_SECONDS", 0.1)
    async with scripted(prefilled) as one, scripted(stalled) as two, aiohttp.ClientSession() as session:
        async with HttpServer("127.0.0.1", 0, [one.url], [two.url], Timeouts(30, 30)) as server:
            asking = asyncio.create_task(session.post(f"http://{server.address}{PATH}", json=BODY))
            response = await asking
        await two.until(lambda scripted: scripted.aborted == 1)
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
