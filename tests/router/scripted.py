"""Servers that pretend to be vLLM, and a router between them."""

import asyncio
import contextlib
import io
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web

from kvd.router.clients.http import HttpServer
from kvd.router.upstream import Timeouts
from tests.support.patience import MOMENT

PARAMS = {"do_remote_prefill": True, "do_remote_decode": False, "kvd_ticket": "T", "kvd_prompt": 7, "more": [1, {}]}
BODY = {"model": "m", "prompt": "a b c", "max_tokens": 3, "stream": True, "unknown": {"kept": [1.0, None]}}
PATH = "/v1/completions"
DONE = b"data: [DONE]\n\n"

Answering = Callable[["Scripted", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def event(number: int) -> bytes:
    return b'data: {"choices": [{"text": "t%d"}]}\n\n' % number


class Scripted:
    """A server whose answers `answering` makes; it notes what it is asked, and which requests were cut off."""

    def __init__(self, answering: Answering) -> None:
        self.answering = answering
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.paths: list[str] = []
        self.open = 0
        self.aborted = 0
        self.changed = asyncio.Condition()

    @property
    def asked(self) -> list[dict[str, Any]]:
        """The bodies of requests for tokens: those of prefills, and of releases, ask for one alone."""
        return [body for body in self.bodies if body["max_tokens"] != 1]

    @property
    def releases(self) -> list[dict[str, Any]]:
        """The bodies of requests that a decode server gets to let an offer go."""
        return [body for body in self.bodies if body["max_tokens"] == 1]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return web.json_response({"data": [{"id": "m"}]} if request.path == "/v1/models" else {})
        self.paths.append(request.path)
        self.headers.append(request.headers.copy())
        self.open += 1
        try:
            body = json.loads(await request.content.read())  # `json` takes no large ones
            self.bodies.append(body)
            await self.tell()
            return await self.answering(self, request, body)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.open -= 1
            await asyncio.shield(self.tell())

    async def tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, holds: Callable[["Scripted"], bool]) -> None:
        async with asyncio.timeout(MOMENT), self.changed:
            await self.changed.wait_for(lambda: holds(self))


async def prefilled(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"choices": [], "kv_transfer_params": PARAMS})


async def decoded(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    if not body.get("stream"):
        return web.json_response({"choices": [{"text": "t1"}]})
    stream = await streaming(request)
    for number in range(body["max_tokens"]):
        await stream.write(event(number))
    await stream.write(DONE)
    return stream


async def streaming(request: web.Request) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await stream.prepare(request)
    return stream


async def hanging(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def stalled(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    stream = await streaming(request)
    await stream.write(event(0))
    await asyncio.Event().wait()
    raise AssertionError


async def failing(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no KV", "code": 500}}, status=500)


async def too_large(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"choices": ["x" * 2000], "kv_transfer_params": PARAMS})


async def refusing(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "too long", "code": 400}}, status=400)


def answering(status: int, **headers: str) -> Answering:
    async def answer(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        headers_of_it = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response({"error": {"code": status}}, status=status, headers=headers_of_it)

    return answer


async def vanishing(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    request.transport.abort()
    return web.Response()


async def broken_off(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    stream = await streaming(request)
    await stream.write(event(0))
    request.transport.close()
    return stream


async def failing_in_stream(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    stream = await streaming(request)
    await stream.write(b'data: {"error": {"message": "no KV", "code": 500}}\n\n' + DONE)
    return stream


async def failing_after_role(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    stream = await streaming(request)
    await stream.write(b": ping\n\n")
    await stream.write(b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\nda')
    await stream.write(b'ta: {"error": {"message": "no KV", "code": 500}}\n\n' + DONE)
    return stream


async def empty(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await streaming(request) if body.get("stream") else web.Response(content_type="application/json")


async def pinging(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    stream = await streaming(request)
    while True:
        await stream.write(b": ping\n\n")
        await asyncio.sleep(0.01)


async def without_params(server: Scripted, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"choices": [], "kv_transfer_params": None})


async def until(holds: Callable[[], bool]) -> None:
    """Waits for what nobody announces."""
    async with asyncio.timeout(MOMENT):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class Stage:
    """A router at `url` between scripted servers, and a session to ask it with."""

    def __init__(self, server: HttpServer, prefill: list[Scripted], decode: list[Scripted]) -> None:
        self.server = server
        self.url = f"http://{server.address}"
        self.prefill = prefill
        self.decode = decode
        self.session = aiohttp.ClientSession()

    async def ask(self, path: str = PATH, headers: dict[str, str] | None = None, **more: Any) -> tuple[int, bytes]:
        data = io.BytesIO(json.dumps(BODY | more).encode())  # aiohttp wants large ones so
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            return response.status, await response.read()

    async def error(self, **more: Any) -> tuple[int, dict[str, Any]]:
        status, said = await self.ask(**more)
        return status, json.loads(said)["error"]

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.text()

    async def metric(self, line: str) -> float:
        """The sample whose name and labels are `line`."""
        _, text = await self.get("/metrics")
        return next(float(found.rpartition(" ")[2]) for found in text.splitlines() if found.startswith(line + " "))


@contextlib.asynccontextmanager
async def scripted(
    answering: Answering, host: str = "127.0.0.1", kind: type[Scripted] = Scripted
) -> AsyncIterator[Scripted]:
    server = kind(answering)
    runner = web.ServerRunner(  # which takes headers as long as vLLM does
        web.Server(server.handle, handler_cancellation=True, access_log=None, max_field_size=1 << 20)
    )
    await runner.setup()
    site = web.TCPSite(runner, host, 0, backlog=2048)
    await site.start()
    server.url = f"http://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        runner._shutdown_timeout = 0.1
        await runner.cleanup()


@contextlib.asynccontextmanager
async def routed(
    prefill: list[Answering],
    decode: list[Answering],
    *,
    seconds: tuple[float, float] = (MOMENT, MOMENT),
    host: str = "127.0.0.1",
    turns: bool = True,
) -> AsyncIterator[Stage]:
    async with contextlib.AsyncExitStack() as stack:
        ps = [await stack.enter_async_context(scripted(answering, host)) for answering in prefill]
        ds = [await stack.enter_async_context(scripted(answering, host)) for answering in decode]
        urls = [server.url for server in ps], [server.url for server in ds]
        server = await stack.enter_async_context(HttpServer(host, 0, *urls, Timeouts(*seconds), turns=turns))
        stage = Stage(server, ps, ds)
        await stack.enter_async_context(stage.session)
        yield stage


def head(length: int) -> bytes:
    return f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()


def bound(stage: Stage) -> tuple[str, int]:
    return stage.server._listener.sockets[0].getsockname()


def connect(stage: Stage) -> socket.socket:
    """A client that takes little at a time."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        client.connect(bound(stage))
    return client
