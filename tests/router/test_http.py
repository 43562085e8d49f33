"""The router's port: its paths, and clients that ask too much, too slowly or not to the end."""

import asyncio
import contextlib
import json
import logging
import os
import resource
import socket
import threading
from collections.abc import Iterator

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict

from kvd.errors import BadRequest
from kvd.router import limits
from kvd.router.body import Body
from kvd.router.clients.completions import passed_on
from kvd.router.clients.connections import Connection
from kvd.router.clients.http import HttpServer
from kvd.router.engines import place
from kvd.router.upstream import Timeouts
from tests.router.scripted import (
    BODY,
    DONE,
    PATH,
    Scripted,
    bound,
    connect,
    decoded,
    event,
    head,
    prefilled,
    routed,
    stalled,
    streaming,
    until,
)
from tests.support.patience import PATIENCE

CLIENTS = 1000


@pytest.fixture
def many_clients() -> Iterator[list[socket.socket]]:
    """Those that a test adds are closed after it, and as many descriptors may be open meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8 * CLIENTS), hard))
    clients: list[socket.socket] = []
    yield clients
    for client in clients:
        client.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_headers_that_any_of_several_connection_headers_names_are_not_passed_on() -> None:
    headers = CIMultiDict(
        [("Connection", "keep-alive"), ("X-Hop", "1"), ("connection", "close, x-hop"), ("X-Own", "2")]
    )
    assert sorted(passed_on(headers)) == ["Content-Type", "X-Own"]


async def endless(server, request, body):
    stream = await streaming(request)
    while True:
        await stream.write(event(0) * 1000)


async def fall_to(tasks: int, descriptors: int) -> None:
    await until(lambda: len(asyncio.all_tasks()) <= tasks and len(os.listdir("/proc/self/fd")) <= descriptors)


async def test_it_is_ready_when_a_server_of_each_role_answers(monkeypatch) -> None:
    async with routed([prefilled, prefilled], [decoded]) as stage:
        monkeypatch.setattr(limits, "PROBE_SECONDS", 0.0)
        assert await stage.get("/healthz") == (200, "alive\n")
        assert await stage.get("/readyz") == (200, "ready\n")
        stage.server._health._groups[0].all[0].place = place("http://127.0.0.1:1")
        assert await stage.get("/readyz") == (200, "ready\n")
        stage.server._decodes.all[0].place = place("http://127.0.0.1:1")
        status, text = await stage.get("/readyz")
        assert status == 503
        assert text.startswith("no decode server is healthy: decode server http://127.0.0.1:1 cannot be reached")
        assert (await stage.get("/healthz"))[0] == 200


async def test_the_models_are_those_of_a_decode_server() -> None:
    async with routed([prefilled], [decoded, decoded]) as stage:
        stage.server._decodes.all[0].place = place("http://127.0.0.1:1")
        assert await stage.get("/v1/models") == (200, '{"data": [{"id": "m"}]}')
        stage.server._decodes.all[1].place = place("http://127.0.0.1:1")
        status, text = await stage.get("/v1/models")
        assert (status, json.loads(text)["error"]["code"]) == (502, "peer_lost")


@pytest.mark.parametrize(("path", "status"), [("/v1/models", 502), ("/readyz", 503)])
async def test_what_servers_say_of_themselves_has_a_bound(monkeypatch, path: str, status: int) -> None:
    async def telling(server: Scripted, request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"x" * 2000)

    monkeypatch.setattr(Scripted, "handle", telling)
    monkeypatch.setattr(limits, "PROBE_BYTES", 1000)
    async with routed([prefilled], [decoded]) as stage:
        answered, said = await stage.get(path)
        assert answered == status
        assert "answered with more than 1000 bytes" in said


async def test_requests_for_the_models_are_passed_on_a_few_at_a_time(monkeypatch) -> None:
    """Each takes a connection to a server, which no other bound counts."""
    monkeypatch.setattr(limits, "LISTINGS", 2)
    asked, go_on = asyncio.Semaphore(0), asyncio.Event()
    async with routed([prefilled], [decoded]) as stage:
        get = stage.server._upstream.get

        async def later(*what):
            asked.release()
            await go_on.wait()
            return await get(*what)

        stage.server._upstream.get = later
        asking = [asyncio.create_task(stage.get("/v1/models")) for _ in range(2)]
        for _ in asking:
            await asked.acquire()
        status, text = await stage.get("/v1/models")
        assert (status, json.loads(text)["error"]["code"]) == (503, "overloaded")
        assert (await stage.ask())[0] == 200
        go_on.set()
        assert [status for status, _ in await asyncio.gather(*asking)] == [200, 200]


async def test_a_slash_at_the_end_of_a_path_changes_nothing() -> None:
    async with routed([prefilled], [decoded]) as stage:
        assert (await stage.ask(PATH + "/"))[0] == 200
        assert stage.prefill[0].paths == stage.decode[0].paths == [PATH]
        assert (await stage.get("/healthz/"))[0] == 200


async def test_an_unknown_path_is_answered_with_those_that_there_are() -> None:
    async with routed([prefilled], [decoded]) as stage:
        status, text = await stage.get("/v1/embeddings")
        assert status == 404
        assert "/v1/chat/completions" in json.loads(text)["error"]["message"]


async def test_what_is_in_flight_is_counted_by_server() -> None:
    async with routed([prefilled], [stalled]) as stage:
        asking = asyncio.create_task(stage.ask())
        await stage.decode[0].until(lambda server: server.open == 1)
        line = f'kvd_router_in_flight{{role="decode",server="{stage.decode[0].url}"}}'
        assert await stage.metric(line) == 1
        asking.cancel()


async def test_it_works_between_ipv6_addresses() -> None:
    async with routed([prefilled], [decoded], host="::1") as stage:
        assert stage.url.startswith("http://[::1]:")
        assert (await stage.ask())[0] == 200
        assert await stage.get("/readyz") == (200, "ready\n")


@pytest.mark.parametrize("path", ["/health", "/healthz"])
async def test_load_balancers_may_ask_with_head(path: str) -> None:
    async with routed([prefilled], [decoded]) as stage, stage.session.head(stage.url + path) as response:
        assert response.status == 200


async def test_health_is_what_a_client_of_vllm_expects_of_it(monkeypatch) -> None:
    async with routed([prefilled], [decoded]) as stage:
        monkeypatch.setattr(limits, "PROBE_SECONDS", 0.0)
        assert (await stage.get("/health"))[0] == 200
        stage.server._decodes.all[0].place = place("http://127.0.0.1:1")
        assert (await stage.get("/health"))[0] == 503


async def test_a_client_that_waits_for_leave_to_send_its_body_gets_it() -> None:
    async with routed([prefilled], [decoded]) as stage:
        reader, writer = await asyncio.open_connection(*bound(stage))
        data = json.dumps(BODY).encode()
        asking = head(len(data)).replace(b"\r\n\r\n", b"\r\nExpect: 100-Continue\r\nConnection: close\r\n\r\n")
        writer.write(asking)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(data)
        assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"
        writer.close()
        assert "Expect" not in stage.prefill[0].headers[0]


async def test_a_client_that_waits_for_leave_to_send_too_much_is_refused_before() -> None:
    async with routed([prefilled], [decoded]) as stage:
        reader, writer = await asyncio.open_connection(*bound(stage))
        asking = head(limits.BODY_BYTES + 1).replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n")
        writer.write(asking)
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        writer.close()


@pytest.mark.parametrize("length", ["known", "unknown"])
async def test_a_body_that_is_too_large_is_refused(monkeypatch, length: str) -> None:
    monkeypatch.setattr(limits, "BODY_BYTES", 1000)

    async def parts():
        for _ in range(20):
            yield b"x" * 100

    async with routed([prefilled], [decoded]) as stage:
        data = b"x" * 2000 if length == "known" else parts()
        async with stage.session.post(stage.url + PATH, data=data) as response:
            assert response.status == 413
            assert "at most 1000 are taken" in (await response.json())["error"]["message"]
        assert stage.server._intake.body_bytes.total == 0


async def test_the_loop_goes_on_while_large_bodies_are_read_one_at_a_time(monkeypatch) -> None:
    reading, go_on = [], threading.Event()

    def slow(data: bytes) -> Body:
        if len(data) > limits.LARGE_BYTES:
            reading.append(len(data))
            assert go_on.wait(PATIENCE)
        return Body(data)

    monkeypatch.setattr("kvd.router.clients.completions.Body", slow)
    async with routed([prefilled], [decoded]) as stage:
        asking = [asyncio.create_task(stage.ask(prompt="x" * limits.LARGE_BYTES)) for _ in range(2)]
        await until(lambda: stage.server._intake.requests == 2 and len(reading) == 1)
        assert (await stage.ask())[0] == 200
        assert len(reading) == 1
        go_on.set()
        assert [status for status, _ in await asyncio.gather(*asking)] == [200, 200]


async def test_bodies_have_a_bound_together(monkeypatch) -> None:
    monkeypatch.setattr(limits, "BODIES_BYTES", 400)
    async with routed([prefilled], [stalled]) as stage:
        asking = [asyncio.create_task(stage.ask()) for _ in range(2)]
        await stage.decode[0].until(lambda server: server.open == 2)
        status, error = await stage.error(prompt="x" * 300)
        assert (status, error["code"]) == (503, "overloaded")
        for task in asking:
            task.cancel()
        await stage.server._intake.idle.wait()
        assert stage.server._intake.body_bytes.total == 0
        assert (await stage.error(prompt=["a", "b"]))[0] == 400


async def test_requests_in_flight_have_a_bound(monkeypatch) -> None:
    monkeypatch.setattr(limits, "REQUESTS", 2)
    async with routed([prefilled], [stalled]) as stage:
        asking = [asyncio.create_task(stage.ask()) for _ in range(2)]
        await stage.decode[0].until(lambda server: server.open == 2)
        status, error = await stage.error()
        assert (status, error["code"]) == (503, "overloaded")
        assert "2 requests are in flight" in error["message"]
        assert await stage.metric('kvd_router_requests_total{outcome="overloaded"}') == 1
        for task in asking:
            task.cancel()


async def test_bodies_that_come_slowly_take_no_place_of_others(monkeypatch) -> None:
    monkeypatch.setattr(limits, "REQUESTS", 1)
    async with routed([prefilled], [decoded]) as stage:
        slow = [await asyncio.open_connection(*bound(stage)) for _ in range(5)]
        for _, writer in slow:
            writer.write(head(100) + b"{")
        await until(lambda: stage.server._intake.requests == 5)
        assert (await stage.ask())[0] == 200
        for _, writer in slow:
            writer.close()


async def test_bodies_that_do_not_end_make_room_for_those_of_clients_with_fewer_bytes(monkeypatch) -> None:
    """Two addresses could otherwise have all of it for a minute at a time."""
    monkeypatch.setattr(limits, "BODIES_BYTES", 1000)
    async with routed([prefilled], [decoded]) as stage:
        intake, held = stage.server._intake, contextlib.ExitStack()
        with held:
            for address, total, size in (("127.0.0.2", 300, 300), ("127.0.0.2", 500, 200), ("127.0.0.3", 990, 490)):
                made = held.enter_context(socket.create_connection(bound(stage), source_address=(address, 0)))
                made.sendall(head(size + 1) + b"x" * size)
                await until(lambda total=total: intake.body_bytes.total == total)
            assert (await stage.ask())[0] == 200
            assert intake.body_bytes.total == 690, "the largest of the client with the most bytes is gone"
            status, error = await stage.error(prompt="x" * 700)
            assert (status, error["code"]) == (503, "overloaded"), "nobody has more than it would have"
        await until(lambda: intake.requests == 0)
        assert (intake.body_bytes.total, intake._coming) == (0, {})


@pytest.mark.parametrize(
    ("bound", "most", "said"),
    [
        pytest.param("CLIENT_REQUESTS", 1, "1 requests of 127.0.0.1 are in flight", id="requests"),
        pytest.param("CLIENT_BODIES_BYTES", 150, "the bodies of 127.0.0.1 fill the memory", id="bodies"),
    ],
)
async def test_one_client_leaves_room_for_others(monkeypatch, bound: str, most: int, said: str) -> None:
    monkeypatch.setattr(limits, bound, most)
    connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
    async with routed([prefilled], [stalled]) as stage, aiohttp.ClientSession(connector=connector) as other:
        asking = asyncio.create_task(stage.ask())
        await stage.decode[0].until(lambda server: server.open == 1)
        status, error = await stage.error()
        assert (status, error["code"]) == (503, "overloaded")
        assert said in error["message"]
        async with other.post(stage.url + PATH, json=BODY) as response:
            assert response.status == 200
        asking.cancel()


@pytest.mark.parametrize(
    ("sent", "limit"),
    [
        pytest.param(b"", "IDLE_SECONDS", id="nothing"),
        pytest.param(b"POST /v1/comp", "IDLE_SECONDS", id="half a head"),
        pytest.param(head(100) + b"{", "BODY_SECONDS", id="half a body"),
    ],
)
async def test_a_client_that_sends_too_slowly_is_let_go(monkeypatch, sent: bytes, limit: str) -> None:
    monkeypatch.setattr(limits, limit, 0.2)
    async with routed([prefilled], [decoded]) as stage:
        reader, writer = await asyncio.open_connection(*stage.server._listener.sockets[0].getsockname())
        writer.write(sent)
        said = await reader.read()
        assert said.startswith(b"HTTP/1.1 504") == sent.startswith(b"POST /v1/completions ")
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"\x16\x03\x01 hello\r\n\r\n", id="no HTTP"),
        pytest.param(
            head(10).replace(b"Content-Length: 10", b"Transfer-Encoding: chunked") + b"zz\r\n", id="no chunks"
        ),
        pytest.param(head(10) + b'{"prompt"}', id="no JSON"),
        pytest.param(head(0), id="nothing"),
        pytest.param(head(4010) + b'{"prompt":' + b"[" * 2000 + b"]" * 1999 + b"}", id="too deep"),
        pytest.param(
            b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: application/openmetrics-text;version=abc\r\n\r\n",
            id="a version that is none",
        ),
        pytest.param(
            b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: text/plain;version=x;escaping=values\r\n\r\n",
            id="another version that is none",
        ),
    ],
)
async def test_what_is_no_request_is_refused_counted_and_logged_by_nobody(sent: bytes, caplog) -> None:
    async with routed([prefilled], [decoded]) as stage:
        reader, writer = await asyncio.open_connection(*stage.server._listener.sockets[0].getsockname())
        writer.write(sent)
        assert b" 400 Bad Request" in await reader.readline()
        writer.close()
        refused = await stage.metric('kvd_router_requests_total{outcome="refused"}')
        assert refused + await stage.metric("kvd_router_malformed_total") == 1
        assert (await stage.ask())[0] == 200
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_body_that_ends_with_its_client_is_logged_by_nobody(caplog) -> None:
    async with routed([prefilled], [decoded]) as stage:
        _, writer = await asyncio.open_connection(*stage.server._listener.sockets[0].getsockname())
        writer.write(head(100) + b"{")
        line = 'kvd_router_requests_total{outcome="client_gone"}'
        while not stage.server._intake.requests:
            await stage.get("/healthz")
        writer.close()
        await stage.server._intake.idle.wait()
        assert await stage.metric(line) == 1
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("name", ["X-Long: " + "x" * 20_000, "\r\n".join(f"X-{number}: x" for number in range(100))])
async def test_headers_have_a_bound(name: str) -> None:
    async with routed([prefilled], [decoded]) as stage:
        reader, writer = await asyncio.open_connection(*stage.server._listener.sockets[0].getsockname())
        writer.write(f"GET /healthz HTTP/1.1\r\nHost: x\r\n{name}\r\n\r\n".encode())
        assert (await reader.read()).startswith(b"HTTP/1.0 400")
        writer.close()
        assert await stage.metric("kvd_router_malformed_total") == 1


async def test_a_slow_client_slows_its_decode_server_and_gets_every_byte() -> None:
    written = 0
    parts = 4000
    part = b"data: " + b"x" * 8000 + b"\n\n"

    async def decode(server, request, body):
        nonlocal written
        stream = await streaming(request)
        await stream.write(event(0))
        for written in range(1, parts + 1):  # noqa: B007
            await stream.write(part)
        await stream.write(DONE)
        return stream

    async with (
        routed([prefilled], [decode]) as stage,
        stage.session.post(stage.url + PATH, json=BODY, read_bufsize=4096) as response,
    ):
        before = -1
        while before != written:
            before = written
            for _ in range(100):
                await asyncio.sleep(0)
        assert before < parts
        assert await response.read() == event(0) + part * parts + DONE


async def test_a_client_that_takes_nothing_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr(limits, "CLIENT_SECONDS", 0.2)

    async with routed([prefilled], [endless]) as stage:
        client = connect(stage)
        data = json.dumps(BODY).encode()
        await asyncio.get_running_loop().sock_sendall(client, head(len(data)) + data)
        await stage.decode[0].until(lambda server: server.open == 1)
        await stage.decode[0].until(lambda server: server.open == 0)
        await stage.server._intake.idle.wait()
        assert await stage.metric('kvd_router_requests_total{outcome="client_gone"}') == 1
        client.close()


async def test_a_client_that_takes_nothing_of_the_models_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr(limits, "CLIENT_SECONDS", 0.2)

    async def telling(server: Scripted, request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"x" * limits.PROBE_BYTES)

    monkeypatch.setattr(Scripted, "handle", telling)
    async with routed([prefilled], [decoded]) as stage:
        with connect(stage) as client:
            await asyncio.get_running_loop().sock_sendall(client, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            connections = stage.server._connections
            await until(lambda: len(connections._open) == 1)
            await until(lambda: not connections._open)


@pytest.mark.slow
@pytest.mark.timeout(600)  # the servers of the test and the router share one core with others
async def test_a_thousand_clients_that_are_slow_or_vanish_leave_nothing(many_clients: list[socket.socket]) -> None:
    data = json.dumps(BODY).encode()
    whole = head(len(data)) + data
    sent = [b"", whole[:20], whole[:-20], whole, whole + whole[:20], whole]
    loop = asyncio.get_running_loop()

    async with routed([prefilled] * 2, [endless] * 2) as stage:
        assert (await stage.get("/healthz"))[0] == 200
        descriptors, tasks = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
        many_clients += [connect(stage) for _ in range(CLIENTS)]
        for number, client in enumerate(many_clients):
            await loop.sock_sendall(client, sent[number % len(sent)])
            if number < CLIENTS // 5:
                client.close()
        asking = sum(text.startswith(whole) for text in sent) * (CLIENTS - CLIENTS // 5) // len(sent)
        for server in stage.decode:
            await server.until(lambda one: one.open >= asking // 2 - 10)
        for client in many_clients[CLIENTS // 5 : CLIENTS // 2]:
            client.close()
        for client in many_clients[CLIENTS // 2 :]:
            with contextlib.suppress(BlockingIOError):
                client.recv(100)
        assert (await stage.get("/healthz"))[0] == 200
        for client in many_clients:
            client.close()
        await stage.server._intake.idle.wait()
        for server in stage.prefill + stage.decode:
            await server.until(lambda one: one.open == 0)
        assert stage.server._intake.body_bytes.total == 0
        await fall_to(tasks, descriptors)
        assert all(server.in_flight == 0 for group in stage.server._health._groups for server in group.all)


async def test_a_client_that_leaves_as_its_answer_begins_is_no_failure(monkeypatch, caplog) -> None:
    prepare = web.StreamResponse.prepare

    async def leave_first(response: web.StreamResponse, request: web.BaseRequest):
        if isinstance(request.protocol, Connection):  # the router's, not a server's
            request.transport.close()
        return await prepare(response, request)

    async with routed([prefilled], [decoded]) as stage:
        with monkeypatch.context() as patched:
            patched.setattr("kvd.router.reply.web.StreamResponse.prepare", leave_first)
            with pytest.raises(aiohttp.ClientError):
                await asyncio.wait_for(stage.ask(), PATIENCE)
        await stage.server._intake.idle.wait()
        assert await stage.metric('kvd_router_requests_total{outcome="client_gone"}') == 1
    assert not [record for record in caplog.records if record.exc_info]


async def test_an_address_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadRequest, match=f"cannot listen on 127.0.0.1:{port}"):
            await HttpServer("127.0.0.1", port, ["http://x"], ["http://y"], Timeouts(1, 1)).__aenter__()
