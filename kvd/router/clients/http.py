"""The router's HTTP port, and its paths."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from types import TracebackType

from aiohttp import web

from kvd.errors import BadRequest, ErrorCode, KvdError, refusal
from kvd.exposition import Exposition
from kvd.limits import MAX_NAME_BYTES
from kvd.router import limits
from kvd.router.answer import ServerFailed
from kvd.router.clients.completions import Completions, passed_on
from kvd.router.clients.connections import Connection, Connections, connection_of
from kvd.router.clients.intake import Intake
from kvd.router.metrics import Metrics
from kvd.router.reply import error_answer
from kvd.router.route import Router
from kvd.router.servers import Server, Servers
from kvd.router.upstream import Timeouts, Upstream

_PATHS = "POST /v1/completions, /v1/chat/completions; GET /v1/models, /metrics, /healthz, /readyz, /health"


class Health:
    """Asks servers for /health when somebody wants to know, and again only when the answer is old."""

    def __init__(self, groups: Sequence[Servers], upstream: Upstream) -> None:
        self._groups = groups
        self._upstream = upstream
        self._lock = asyncio.Lock()
        self._asked = -limits.PROBE_SECONDS
        self._reasons: list[str] = []

    async def reasons(self) -> list[str]:
        """Why the router is not ready, a line for each role of which no server is healthy."""
        async with self._lock:
            if time.monotonic() - self._asked >= limits.PROBE_SECONDS:
                self._reasons = [reason for servers in self._groups if (reason := await self._why_not(servers))]
                self._asked = time.monotonic()
            return self._reasons

    async def _why_not(self, servers: Servers) -> str:
        reasons = await asyncio.gather(*(self._failure(server) for server in servers.all))
        return "" if "" in reasons else f"no {servers.role} server is healthy: {'; '.join(reasons)}\n"

    async def _failure(self, server: Server) -> str:
        try:
            status, _ = await self._upstream.get(server, "/health", {})
        except ServerFailed as failure:
            return failure.text
        return "" if status == 200 else f"{server.name} answered with status {status}"


class HttpServer:
    """Routes between the servers at the URLs `prefill` and `decode`. Use as an async context manager."""

    def __init__(
        self,
        host: str,
        port: int,
        prefill: Sequence[str],
        decode: Sequence[str],
        timeouts: Timeouts,
        *,
        turns: bool = True,
    ) -> None:
        self._place = host, port
        prefills, self._decodes = Servers("prefill", prefill), Servers("decode", decode)
        self._upstream = Upstream(timeouts)
        self._metrics = Metrics((*prefills.all, *self._decodes.all))
        self._exposition = Exposition(self._metrics.registry)
        self._router = Router(prefills, self._decodes, self._upstream, self._metrics, turns=turns)
        self._health = Health((prefills, self._decodes), self._upstream)
        self._intake = Intake()
        self._connections = Connections()
        self._listings = asyncio.Semaphore(limits.LISTINGS)
        self._completions = Completions(self._router, self._intake, self._connections, self._metrics)

    async def __aenter__(self) -> "HttpServer":
        """Listens.

        Raises:
            BadRequest: `BAD_CONFIG`, the address cannot be bound.

        """
        # A client that disconnects ends its requests to the servers, too.
        self._server = web.Server(self._handle, handler_cancellation=True)
        host, port = self._place
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                lambda: Connection(self._server, self._connections, self._metrics),
                host,
                port,
                backlog=limits.REQUESTS,
            )
        except (OSError, OverflowError, TypeError, UnicodeError) as error:  # the latter two of names that are none
            raise refusal(ErrorCode.BAD_CONFIG, f"listen: cannot listen on {host}:{port}: {error}") from error
        bound, number = self._listener.sockets[0].getsockname()[:2]
        self.address = f"[{bound}]:{number}" if ":" in bound else f"{bound}:{number}"
        """The host:port of the listening socket."""
        await self._upstream.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops listening, lets requests in flight end for a while, and cancels the others."""
        self._listener.close()
        self._server.pre_shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.STOP_SECONDS):
                await self._intake.idle.wait()
        await self._server.shutdown(limits.CANCEL_SECONDS)
        await self._router.close()
        self._completions.close()
        await self._upstream.__aexit__(kind, error, trace)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request of a client. The end of its answer is sent here, since aiohttp would wait for it without end."""
        response = await self._answer(request)
        try:
            async with asyncio.timeout(limits.CLIENT_SECONDS):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            connection_of(request).abort()
        except ConnectionError:  # the client has left, or its answer was broken off
            pass
        return response

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        match "GET" if request.method == "HEAD" else request.method, request.path.rstrip("/"):
            case "POST", "/v1/completions" | "/v1/chat/completions":
                return await self._completions.handle(request)
            case "GET", "/v1/models":
                return await self._models(request)
            case "GET", "/metrics":
                return self._scraped(request.headers.get("Accept", ""))
            case "GET", "/healthz":
                return web.Response(text="alive\n")
            case "GET", "/readyz" | "/health":  # the second is vLLM's
                reasons = await self._health.reasons()
                return web.Response(text="".join(reasons) or "ready\n", status=503 if reasons else 200)
            case _:
                text = f"there is no {request.method} {request.path[:MAX_NAME_BYTES]}; there are: {_PATHS}"
                return error_answer(refusal(ErrorCode.UNKNOWN_REQUEST, text))

    def _scraped(self, accept: str) -> web.Response:
        try:
            body, kind = self._exposition.answer(accept)
        except BadRequest as error:
            self._metrics.malformed.inc()
            return error_answer(error)
        return web.Response(body=body, headers={"Content-Type": kind})

    async def _models(self, request: web.BaseRequest) -> web.Response:
        """What the first decode server that answers serves."""
        failure: KvdError = refusal(ErrorCode.PEER_LOST, "there is no decode server")
        if self._listings.locked():
            text = f"{limits.LISTINGS} requests for the models are in flight: try again later"
            return error_answer(refusal(ErrorCode.OVERLOADED, text))
        async with self._listings:
            for server in self._decodes.all:
                try:
                    status, said = await self._upstream.get(server, "/v1/models", passed_on(request.headers))
                except ServerFailed as error:
                    failure = error
                else:
                    return web.Response(body=said, status=status, content_type="application/json")
        return error_answer(failure)
