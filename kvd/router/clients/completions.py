"""A client's request for a completion, from its head to its outcome."""

import asyncio
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

from aiohttp import web
from multidict import CIMultiDict

from kvd.errors import BadRequest, ErrorCode, KvdError, Unavailable
from kvd.router import limits
from kvd.router.body import Body, Request
from kvd.router.clients.connections import Connections, connection_of
from kvd.router.clients.intake import Intake
from kvd.router.metrics import Metrics, Outcome
from kvd.router.reply import ClientGone, Reply
from kvd.router.route import BrokenOff, Router

_REQUEST_ID = "X-Request-Id"


class Completions:
    """Takes requests in, has them routed, and counts how they end."""

    def __init__(self, router: Router, intake: Intake, connections: Connections, metrics: Metrics) -> None:
        self._router = router
        self._intake = intake
        self._connections = connections
        self._metrics = metrics
        self._reader = ThreadPoolExecutor(1, "kvd-large-bodies")

    def close(self) -> None:
        """Ends the thread."""
        self._reader.shutdown()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request. Being cancelled means that the client has disconnected."""
        reply = Reply(request)
        outcome = Outcome.FAILED
        try:
            response = await self._answered(request, reply)
            outcome = Outcome.DONE if response.status < HTTPStatus.BAD_REQUEST else Outcome.REFUSED
        except asyncio.CancelledError:
            outcome = Outcome.CLIENT_GONE
            raise
        except KvdError as error:
            outcome = _outcome(error)
            return await reply.fail(error)
        else:
            return response
        finally:
            self._metrics.requests.labels(outcome).inc()

    async def _body(self, data: bytes) -> Body:
        """Reads large ones beside the loop, one at a time: others get their turn between the steps of that."""
        if len(data) <= limits.LARGE_BYTES:
            return Body(data)
        return await asyncio.get_running_loop().run_in_executor(self._reader, _read, data)

    async def _answered(self, request: web.BaseRequest, reply: Reply) -> web.StreamResponse:
        connection = connection_of(request)
        with self._intake.room(connection.client) as room:
            data = await room.read(request)
            with self._connections.serving(connection):
                await self._routed(request, connection.client, await self._body(data), reply)
        assert reply.response is not None  # noqa: S101  # the router began it
        return reply.response

    async def _routed(self, request: web.BaseRequest, client: str, body: Body, reply: Reply) -> None:
        headers = passed_on(request.headers)
        headers.setdefault(_REQUEST_ID, uuid.uuid4().hex)  # by which the logs of both servers name it
        try:
            async with asyncio.timeout(limits.REQUEST_SECONDS):
                routed = Request(request.path.rstrip("/"), body, headers, time.monotonic(), client)
                await self._router.answer(routed, reply)
        except TimeoutError as error:
            text = f"the request took longer than {limits.REQUEST_SECONDS:.0f} s"
            raise BrokenOff(ErrorCode.DEADLINE, text) from error


def _read(data: bytes) -> Body:
    body = Body(data)
    _ = body.prefixes  # hashes most of it
    return body


def _outcome(error: KvdError) -> Outcome:
    match error:
        case BadRequest():
            return Outcome.REFUSED
        case ClientGone():
            return Outcome.CLIENT_GONE
        case BrokenOff():
            return Outcome.BROKEN_OFF
        case Unavailable(code=ErrorCode.OVERLOADED):
            return Outcome.OVERLOADED
        case _:
            return Outcome.FAILED


_NOT_PASSED_ON = frozenset(
    {
        # of the client's connection alone:
        "accept-encoding",  # answers are passed on as they are, and looked into
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        # not for clients to set:
        "content-encoding",  # bodies are written anew, and not encoded
        "x-data-parallel-rank",  # of vLLM
        "x-vllm-priority",
    }
)


def passed_on(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """The client's headers, without those that concern its connection alone, and those that are not for it to set."""
    named = ",".join(value for name, value in headers.items() if name.lower() == "connection").split(",")
    dropped = _NOT_PASSED_ON.union(name.strip().lower() for name in named)
    passed = CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)
    passed["Content-Type"] = "application/json"
    return passed
